"""Resource names and ids."""

import pytest

from gpuscale.api.allocator.v1 import ReservedGpu
from gpuscale.common import names
from gpuscale.common.errors import InvalidArgumentError

GPU_UUID = "GPU-8A6D3F5E-0B1C-4D2E-9F30-112233445566"


@pytest.mark.parametrize(
    ("pattern", "name", "ids"),
    [
        (names.NODE, names.node_name("host-1.example"), {"node": "host-1.example"}),
        (names.GPU, names.gpu_name("a", GPU_UUID), {"node": "a", "gpu": GPU_UUID.lower()}),
        (names.RESERVATION, names.reservation_name("r-1"), {"reservation": "r-1"}),
        (names.ENDPOINT, names.endpoint_name("llm"), {"endpoint": "llm"}),
        (names.REPLICA, names.replica_name("llm", "0"), {"endpoint": "llm", "replica": "0"}),
        (names.DECISION, names.decision_name("llm", "00042"), {"endpoint": "llm", "decision": "00042"}),
        (names.WATCHER, names.watcher_name("jobs"), {"watcher": "jobs"}),
        (names.ADAPTER, names.adapter_name("a"), {"adapter": "a"}),
    ],
)
def test_each_name_matches_its_own_pattern(pattern: str, name: str, ids: dict[str, str]) -> None:
    assert names.match(pattern, name) == ids
    assert names.parse(pattern, name) == ids


@pytest.mark.parametrize(
    "name",
    [
        *("", "nodes/", "nodes/a/", "/nodes/a", "nodes/a/gpus/b", "node/a", "nodes/A", "nodes/a b"),
        *("nodes/..", "nodes/-a", "nodes/a.", "nodes/a\n", "nodes/ä", "nodes/" + "a" * 64),
    ],
)
def test_other_names_are_refused_with_the_field(name: str) -> None:
    assert names.match(names.NODE, name) is None
    with pytest.raises(InvalidArgumentError) as caught:
        names.parse(names.NODE, name, field="node_name")
    assert caught.value.violations[0].field == "node_name"
    assert "nodes/{node}" in caught.value.message


def test_the_dots_of_a_pattern_are_literal() -> None:
    assert names.match("a.b/{x}", "acb/1") is None


def test_to_id_only_lowers_the_case_where_that_is_enough() -> None:
    assert names.to_id("GPU-Host_1.Lan") == "gpu-host_1.lan"


def test_gpu_name_holds_old_mig_uuids_too() -> None:
    """Drivers before R470 name a MIG instance MIG-GPU-<uuid>/<gi>/<ci>."""
    assert names.match(names.GPU, names.gpu_name("a", f"MIG-{GPU_UUID}/1/0")) is not None


def test_an_id_may_stand_in_place_of_a_name() -> None:
    assert [names.id_of(names.NODE, text) for text in ("nodes/alpha", "alpha")] == ["alpha", "alpha"]
    with pytest.raises(InvalidArgumentError) as refused:
        names.id_of(names.NODE, "watchers/alpha", "node")
    assert refused.value.violations[0].field == "node"


@pytest.mark.parametrize(
    "told", [{"node": "n0"}, {"node_name": "nodes/n0", "node": "n0"}, {"node_name": "nodes/n0"}]
)
def test_the_node_of_a_reserved_gpu_is_known_from_allocators_of_any_release(told: dict[str, str]) -> None:
    assert names.node_of(ReservedGpu(**told)) == "n0"
