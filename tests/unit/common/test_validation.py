"""Each rule of the contract, and each default, at its edges. Messages are those of the contract itself."""

import math
from typing import Any

import pytest
from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.api.types.v1 import options_pb2
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.rpc.validation import MAX_VIOLATIONS, validate, value_check, violations

UUID = "01234567-89ab-cdef-0123-456789ABCDEF"


ASK_FIELDS = frozenset(allocator_api.Ask.DESCRIPTOR.fields_by_name)


def reserve(**fields: Any) -> allocator_api.ReserveRequest:
    """A request that is right but for `fields`, its own or those of its ask."""
    ask = {name: value for name, value in fields.items() if name in ASK_FIELDS}
    own = {name: value for name, value in fields.items() if name not in ASK_FIELDS}
    return allocator_api.ReserveRequest(
        **{"request_id": UUID, "holder": "me", "ask": allocator_api.Ask(**{"gpu_count": 1, **ask}), **own}
    )


def wrong(message: Any) -> dict[str, str]:
    return dict(violations(message))


def test_nothing_wrong() -> None:
    assert violations(reserve()) == []


@pytest.mark.parametrize("missing", ["request_id", "holder"])
def test_required_text(missing: str) -> None:
    assert wrong(reserve(**{missing: ""})) == {missing: "must be set"}


def test_required_message() -> None:
    assert wrong(autoscaler_api.CreateEndpointRequest(request_id=UUID)) == {"endpoint": "must be set"}


def test_required_enum_is_not_unspecified() -> None:
    assert "comparator" in wrong(autoscaler_api.StepRule())


@pytest.mark.parametrize(
    ("count", "problem"),
    [
        (0, "must be at least 1"),
        (-1, "must be at least 1"),
        (4097, "must be at most 4096"),
        (2**31 - 1, "must be at most 4096"),
    ],
)
def test_integer_bounds(count: int, problem: str) -> None:
    assert wrong(reserve(gpu_count=count)) == {"ask.gpu_count": problem}


@pytest.mark.parametrize("count", [1, 4096])
def test_integers_at_the_bounds(count: int) -> None:
    assert violations(reserve(gpu_count=count)) == []


def test_a_number_without_presence_is_zero_when_absent() -> None:
    request = allocator_api.ReserveRequest(request_id=UUID, holder="me", ask=allocator_api.Ask())
    assert "ask.gpu_count" in wrong(request)


@pytest.mark.parametrize(
    ("percent", "problem"),
    [
        (0.0, "must be greater than 0"),
        (-5.0, "must be greater than 0"),
        (100.5, "must be at most 100"),
        (math.nan, "must be a finite number"),
        (math.inf, "must be a finite number"),
        (-math.inf, "must be a finite number"),
    ],
)
def test_float_bounds(percent: float, problem: str) -> None:
    assert wrong(reserve(max_utilization_percent=percent)) == {"ask.max_utilization_percent": problem}


@pytest.mark.parametrize("percent", [5e-324, 100.0])
def test_floats_at_the_bounds(percent: float) -> None:
    assert violations(reserve(max_utilization_percent=percent)) == []


def test_optional_number_may_be_absent_where_zero_may_not() -> None:
    reading = types_api.GpuReading()
    assert violations(reading) == []
    reading.memory_total_bytes = 0
    assert wrong(reading) == {"memory_total_bytes": "must be greater than 0"}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_float_without_bounds_is_finite(value: float) -> None:
    assert wrong(autoscaler_api.StepRule(comparator=1, threshold=value, step=1)) == {
        "threshold": "must be a finite number"
    }
    assert wrong(types_api.GpuReading(power_watts=value)) == {"power_watts": "must be a finite number"}


@pytest.mark.parametrize(
    ("seconds", "nanos", "problem"),
    [
        (1, 999_999_999, "must be at least 2 s"),
        (-5, 0, "must be at least 2 s"),
        (604_800, 1, "must be at most 604800 s"),
        (5, -1, "must be a duration within 10,000 years, with seconds and nanos of one sign"),
        (5, 1_000_000_000, "must be a duration within 10,000 years, with seconds and nanos of one sign"),
        (400_000_000_000, 0, "must be a duration within 10,000 years, with seconds and nanos of one sign"),
    ],
)
def test_durations(seconds: int, nanos: int, problem: str) -> None:
    request = reserve()
    request.ttl.seconds, request.ttl.nanos = seconds, nanos
    assert wrong(request) == {"ttl": problem}


def test_durations_at_the_bounds() -> None:
    for seconds in (2, 604_800):
        request = reserve()
        request.ttl.seconds = seconds
        assert violations(request) == []


@pytest.mark.parametrize(
    ("seconds", "nanos"), [(253_402_300_800, 0), (-62_135_596_801, 0), (0, -1), (0, 1_000_000_000)]
)
def test_timestamps(seconds: int, nanos: int) -> None:
    hello = monitor_api.Hello(node="n", epoch=UUID, start_time=Timestamp(seconds=seconds, nanos=nanos))
    assert list(wrong(hello)) == ["start_time"]


def test_timestamps_at_the_bounds() -> None:
    for seconds, nanos in ((253_402_300_799, 999_999_999), (-62_135_596_800, 0)):
        stamp = Timestamp(seconds=seconds, nanos=nanos)
        assert violations(monitor_api.Hello(node="n", epoch=UUID, start_time=stamp)) == []


def test_enum_values_are_defined() -> None:
    assert violations(reserve(policy=1)) == []
    assert wrong(reserve(policy=99)) == {"ask.policy": "must be a value of PlacementPolicy"}
    assert wrong(reserve(policy=-1)) == {"ask.policy": "must be a value of PlacementPolicy"}


@pytest.mark.parametrize("text", ["12345", UUID + "0", UUID[:-1] + "g", UUID.replace("-", ""), UUID + "\n"])
def test_uuid(text: str) -> None:
    assert "request_id" in wrong(reserve(request_id=text))


@pytest.mark.parametrize("text", ["a" * 254, " a", "a ", "a\nb", "a\u202eb", "a\x00b", "a\u200bb", "a\x85"])
def test_label(text: str) -> None:
    assert "holder" in wrong(reserve(holder=text))


@pytest.mark.parametrize("text", ["a", "é ü", "x" * 253, "job #7 (night)"])
def test_labels_that_are_right(text: str) -> None:
    assert violations(reserve(holder=text)) == []


@pytest.mark.parametrize("text", ["A", "a/b", "-a", "a.", "a" * 64, "a b", "../x", "ä"])
def test_id(text: str) -> None:
    assert "node" in wrong(monitor_api.Hello(node=text, epoch=UUID))


def test_a_text_with_a_shape_may_be_absent_unless_required() -> None:
    assert violations(autoscaler_api.Register(adapter="a", kind="process", node="")) == []


@pytest.mark.parametrize("text", ["gpu", "nodes/a/gpus/b", "nodes/", "nodes/../x", "nodes/a/"])
def test_resource_names(text: str) -> None:
    request = monitor_api.GetNodeRequest(name=text)
    assert wrong(request) == {"name": "must look like nodes/{node}"}


def test_a_resource_name_that_is_right_but_for_its_case() -> None:
    """As one gets it who writes the UUID of a GPU as the driver does."""
    assert wrong(reserve(gpus=["nodes/a/gpus/GPU-1f"])) == {
        "ask.gpus[0]": "must look like nodes/{node}/gpus/{gpu}, in lower case"
    }


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a" * 1025, "must have at most 1024 characters"),
        ("a\x07", "must not hold control characters"),
        ("a\x7f", "must not hold control characters"),
        ("\x9b31m", "must not hold control characters"),
        ("a\nb", "must not hold control characters"),
    ],
)
def test_texts_without_rules(text: str, problem: str) -> None:
    assert wrong(monitor_api.ListNodesRequest(page_token=text)) == {"page_token": problem}


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
        for kind in vars(module).values():
            for field in getattr(getattr(kind, "DESCRIPTOR", None), "fields", ()):
                if field.type == field.TYPE_STRING:
                    check = value_check(field, field.GetOptions().Extensions[options_pb2.rules])
                    assert check is not None, field.full_name
                    assert check(text) is not None, field.full_name


@pytest.mark.parametrize("uuid", ["GPU-a,GPU-b", "GPU a", "GPU-é", "GPU-a=b", "g" * 254, "$(id)"])
def test_the_uuid_of_a_gpu_cannot_be_two_in_a_list_nor_a_word_of_a_shell(uuid: str) -> None:
    assert "uuid" in wrong(types_api.Gpu(uuid=uuid))
    assert "gpu_uuids[0]" in wrong(monitor_api.AdmitWorkRequest(gpu_uuids=[uuid], fence=1))


@pytest.mark.parametrize("uuid", ["GPU-51e6c0b6-1f3b", "MIG-GPU-51e6c0b6/1/0", "SIM-0", "0000:01:00.0"])
def test_uuids_of_gpus_that_are_right(uuid: str) -> None:
    assert violations(types_api.Gpu(uuid=uuid)) == []


@pytest.mark.parametrize("text", ["é" * 1024, "no\u00a0break", "日本語", "🙂"])
def test_texts_without_rules_that_are_right(text: str) -> None:
    assert violations(monitor_api.ListNodesRequest(page_token=text)) == []


def test_max_length() -> None:
    for queue, problems in (("q" * 255, []), ("q" * 256, ["queue"])):
        watcher = autoscaler_api.QueueWatcherSpec(broker="b", queue=queue)
        assert list(wrong(watcher)) == problems


def test_lists() -> None:
    assert violations(reserve(nodes=["nodes/a", "nodes/b"])) == []
    assert wrong(reserve(nodes=["nodes/a", "nodes/a"])) == {"ask.nodes": "must not have an item twice"}
    assert wrong(reserve(nodes=["nodes/a", "b"])) == {"ask.nodes[1]": "must look like nodes/{node}"}
    assert wrong(reserve(nodes=["nodes/a", ""])) == {"ask.nodes[1]": "must look like nodes/{node}"}
    many = [f"nodes/n{index}" for index in range(1001)]
    assert violations(reserve(nodes=many[:1000])) == []
    assert wrong(reserve(nodes=many)) == {"ask.nodes": "must have at most 1000 items"}


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


def test_paths_lead_to_the_field() -> None:
    rule = {"id": "r", "signal": "s", "step": {"comparator": 1, "threshold": 1.0, "step": 1}}
    spec = autoscaler_api.EndpointSpec(template={"template": "t"}, rules=[rule, rule, rule])
    spec.rules[2].step.threshold = math.nan
    endpoint = autoscaler_api.Endpoint(name="endpoints/e", spec=spec)
    request = autoscaler_api.CreateEndpointRequest(endpoint=endpoint, request_id=UUID)
    assert wrong(request) == {"endpoint.spec.rules[2].step.threshold": "must be a finite number"}


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
