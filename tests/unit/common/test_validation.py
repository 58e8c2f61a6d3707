"""Each rule of the contract, and each default, at its edges. Messages are those of the contract itself."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.rpc.validation import (
    MAX_VIOLATIONS,
    annotations,
    rules_of,
    validate,
    value_check,
    violations,
)
from gpuscale.internal.autoscaler import v1 as autoscaler_internal
from gpuscale.internal.monitor import v1 as monitor_internal
from tests.support.allocator_values import reserve_request

UUID = "01234567-89ab-cdef-0123-456789ABCDEF"


def reserve(**fields: Any) -> allocator_api.ReserveRequest:
    """A request that is right but for `fields`, its own or those of its ask."""
    return reserve_request(fields.pop("gpu_count", 1), **({"request_id": UUID} | fields))


def wrong(message: Any) -> dict[str, str]:
    return dict(violations(message))


def lasting(seconds: int, nanos: int = 0) -> allocator_api.ReserveRequest:
    request = reserve()
    request.ttl.seconds, request.ttl.nanos = seconds, nanos
    return request


def hello(node: str = "n", seconds: int = 0, nanos: int = 0) -> monitor_internal.Hello:
    return monitor_internal.Hello(node=node, epoch=UUID, start_time=Timestamp(seconds=seconds, nanos=nanos))


def step(threshold: float) -> autoscaler_api.StepRule:
    return autoscaler_api.StepRule(comparator=1, threshold=threshold, step=1)


def token(text: str) -> monitor_api.ListNodesRequest:
    return monitor_api.ListNodesRequest(page_token=text)


def queue(name: str) -> autoscaler_api.QueueWatcherSpec:
    return autoscaler_api.QueueWatcherSpec(broker="b", queue=name)


@pytest.mark.parametrize(
    "message",
    [
        reserve(),
        *(reserve(gpu_count=count) for count in (1, 4096)),
        *(reserve(max_utilization_percent=percent) for percent in (5e-324, 100.0)),
        types_api.GpuReading(),
        *(lasting(seconds) for seconds in (2, 604_800)),
        hello(seconds=253_402_300_799, nanos=999_999_999),
        hello(seconds=-62_135_596_800),
        reserve(policy=1),
        *(reserve(holder=text) for text in ("a", "é ü", "x" * 253, "job #7 (night)")),
        autoscaler_internal.Register(adapter="a", kind="process", node=""),  # a text with a shape, absent
        *(
            types_api.Gpu(uuid=uuid)
            for uuid in ("GPU-51e6c0b6-1f3b", "MIG-GPU-51e6c0b6/1/0", "SIM-0", "0000:01:00.0")
        ),
        *(token(text) for text in ("é" * 1024, "no\u00a0break", "日本語", "🙂")),
        queue("q" * 255),
        monitor_api.RenewCertificateRequest(csr=b"x" * 8192),
    ],
)
def test_nothing_wrong(message: Any) -> None:
    assert violations(message) == []


FINITE = "must be a finite number"
DURATION = "must be a duration within 10,000 years, with seconds and nanos of one sign"
CONTROL = "must not hold control characters"


@pytest.mark.parametrize(
    ("message", "field", "problem"),
    [
        (reserve(request_id=""), "request_id", "must be set"),
        (reserve(holder=""), "holder", "must be set"),
        (autoscaler_api.CreateEndpointRequest(request_id=UUID), "endpoint", "must be set"),
        *((reserve(gpu_count=count), "ask.gpu_count", "must be at least 1") for count in (0, -1)),
        *((reserve(gpu_count=count), "ask.gpu_count", "must be at most 4096") for count in (4097, 2**31 - 1)),
        *(
            (reserve(max_utilization_percent=percent), "ask.max_utilization_percent", problem)
            for percent, problem in (
                (0.0, "must be greater than 0"),
                (-5.0, "must be greater than 0"),
                (100.5, "must be at most 100"),
                (math.nan, FINITE),
                (math.inf, FINITE),
                (-math.inf, FINITE),
            )
        ),
        (types_api.GpuReading(memory_total_bytes=0), "memory_total_bytes", "must be greater than 0"),
        *((step(value), "threshold", FINITE) for value in (math.nan, math.inf, -math.inf)),
        *((types_api.GpuReading(power_watts=value), "power_watts", FINITE) for value in (math.nan, math.inf)),
        (lasting(1, 999_999_999), "ttl", "must be at least 2s"),
        (lasting(-5), "ttl", "must be at least 2s"),
        (lasting(604_800, 1), "ttl", "must be at most 7d"),
        *((lasting(*ttl), "ttl", DURATION) for ttl in ((5, -1), (5, 1_000_000_000), (400_000_000_000,))),
        *((reserve(policy=value), "ask.policy", "must be a value of PlacementPolicy") for value in (99, -1)),
        *(
            (monitor_api.GetNodeRequest(name=name), "name", "must look like nodes/{node}")
            for name in ("gpu", "nodes/a/gpus/b", "nodes/", "nodes/../x", "nodes/a/")
        ),
        (  # as who writes the UUID of a GPU as the driver does
            reserve(gpus=["nodes/a/gpus/GPU-1f"]),
            "ask.gpus[0]",
            "must look like nodes/{node}/gpus/{gpu}, in lower case",
        ),
        (token("a" * 1025), "page_token", "must have at most 1024 characters"),
        *((token(text), "page_token", CONTROL) for text in ("a\x07", "a\x7f", "\x9b31m", "a\nb")),
        (queue("q" * 256), "queue", "must have at most 255 characters"),
        (monitor_api.RenewCertificateRequest(csr=b"x" * 8193), "csr", "must have at most 8192 bytes"),
    ],
)
def test_one_thing_wrong(message: Any, field: str, problem: str) -> None:
    assert wrong(message) == {field: problem}


@pytest.mark.parametrize("code", [0x202E, 0x2066, 0x200B, 0x200D, 0xFEFF, 0x00AD, 0x061C, 0x2028, 0xE0041])
def test_characters_that_are_not_seen_are_refused_wherever_a_text_may_stand(code: int) -> None:
    """What a person reads must be what is stored: no zero width, no turned direction, in any field of the contract."""
    text = f"a{chr(code)}b"
    reason = "must not hold invisible characters"
    assert wrong(allocator_api.CordonNodeRequest(name="nodes/a", reason=text)) == {"reason": reason}
    assert wrong(allocator_api.DrainNodeRequest(name="nodes/a", reason=text)) == {"reason": reason}
    [(_, found)] = wrong(reserve(labels={"team": text})).items()
    assert found == reason
    assert list(wrong(reserve(models=[text]))) == ["ask.models[0]"]
    for module in (allocator_api, autoscaler_api, monitor_api, types_api):
        for kind in (getattr(module, name) for name in dir(module)):
            for field in getattr(getattr(kind, "DESCRIPTOR", None), "fields", ()):
                if field.type == field.TYPE_STRING:
                    check = value_check(field, rules_of(field))
                    assert check is not None, field.full_name
                    assert check(text) is not None, field.full_name


@pytest.mark.parametrize("uuid", ["GPU-a,GPU-b", "GPU a", "GPU-é", "GPU-a=b", "g" * 254, "$(id)"])
def test_the_uuid_of_a_gpu_cannot_be_two_in_a_list_nor_a_word_of_a_shell(uuid: str) -> None:
    assert "uuid" in wrong(types_api.Gpu(uuid=uuid))
    assert "gpu_uuids[0]" in wrong(monitor_api.AdmitWorkRequest(gpu_uuids=[uuid], fence=1))


def test_lists() -> None:
    assert violations(reserve(nodes=["nodes/a", "nodes/b"])) == []
    assert wrong(reserve(nodes=["nodes/a", "nodes/a"])) == {"ask.nodes": "must not have an item twice"}
    assert wrong(reserve(nodes=["nodes/a", "b"])) == {"ask.nodes[1]": "must look like nodes/{node}"}
    assert wrong(reserve(nodes=["nodes/a", ""])) == {"ask.nodes[1]": "must look like nodes/{node}"}
    many = [f"nodes/n{index}" for index in range(1001)]
    assert violations(reserve(nodes=many[:1000])) == []
    assert wrong(reserve(nodes=many)) == {"ask.nodes": "must have at most 1000 items"}


def test_a_reference_may_be_an_id_alone_only_where_the_contract_says_so() -> None:
    token = monitor_api.CreateJoinTokenRequest
    assert violations(token(node="nodes/a")) == violations(token(node="a")) == violations(token()) == []
    assert wrong(token(node="Nodes/a")) == {"node": "must look like nodes/{node}, in lower case"}
    assert wrong(token(node="rooms/a")) == {"node": "must look like nodes/{node}"}
    assert wrong(monitor_api.GetNodeRequest(name="a")) == {"name": "must look like nodes/{node}"}


def test_an_annotation_that_is_not_enforced_is_an_error_and_not_passed_over() -> None:
    known = annotations()
    options = known.field()
    options.Extensions[known.rules].string.prefix = "a"
    field: Any = SimpleNamespace(
        GetOptions=lambda: options, containing_type=SimpleNamespace(GetOptions=known.message)
    )
    with pytest.raises(KeyError, match="prefix"):
        rules_of(field)


def test_a_contract_that_is_not_there_is_not_taken_for_an_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pkgutil.get_data", lambda *_: None)
    with pytest.raises(FileNotFoundError, match=r"gpuscale\.api has no contract\.binpb"):
        annotations.__wrapped__()


def test_max_items() -> None:
    snapshot = types_api.Snapshot(node="n", epoch=UUID)
    snapshot.gpus.extend(types_api.Gpu(uuid=f"GPU-{index}") for index in range(1024))
    assert violations(snapshot) == []
    snapshot.gpus.add(uuid="GPU-more")
    assert wrong(snapshot) == {"gpus": "must have at most 1024 items"}


def test_maps() -> None:
    assert violations(reserve(labels={"team": "search", "empty": ""})) == []
    assert list(wrong(reserve(labels={"": "x"}))) == ['labels[""]']
    assert wrong(reserve(labels={"k": "v" * 1025})) == {'labels["k"]': "must have at most 1024 characters"}
    assert wrong(reserve(labels={"k": "\x1b[2J"})) == {'labels["k"]': "must not hold control characters"}
    assert wrong(reserve(labels={str(n): "" for n in range(65)})) == {
        "labels": "must have at most 64 entries"
    }
    assert violations(reserve(labels={str(n): "" for n in range(64)})) == []


def test_a_wrong_key_is_shown_escaped_and_cut() -> None:
    (field,) = wrong(reserve(labels={'a"\n' + "b" * 300: "x"}))
    assert field == 'labels["a\\"\\n' + "b" * 61 + '..."]'


def test_every_violation_is_reported_up_to_a_limit() -> None:
    assert list(wrong(allocator_api.ReserveRequest())) == ["request_id", "holder", "ask"]
    snapshot = types_api.Snapshot(gpus=[types_api.Gpu()] * 1000)
    assert len(violations(snapshot)) == MAX_VIOLATIONS


def test_a_refusal_names_the_first_field_and_counts_the_others() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^request_id must be set \(and 2 more\)$"):
        validate(allocator_api.ReserveRequest())
    validate(reserve())


def test_types_that_contain_themselves() -> None:
    deep = Struct()
    inner = deep
    for _ in range(20):
        inner = inner.get_or_create_struct("k")
    inner["text"] = "\x00"
    (field,) = wrong(deep)
    assert field.count('fields["k"]') == 20
