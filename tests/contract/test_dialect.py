"""The annotations of the contract: what they say is complete, and means in protovalidate's library what it means here."""

import re
from collections.abc import Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import grpc
import protovalidate
import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pb2 import DescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import ParseDict
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.timestamp_pb2 import Timestamp
from protobuf import Registry
from protobuf._file_registry import create_file_registry
from protobuf.wkt.google.protobuf import descriptor_pb
from protovalidate._gen.buf.validate import validate_pb

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.names import PATTERNS
from gpuscale.common.rpc.validation import violations
from tests.contract.descriptors import PROTOS, Rpc, fill, right, rpcs, wrong
from tests.support.up import Up

PUBLIC = "gpuscale.api."
PATTERN = re.compile(r"\b[a-z][A-Za-z]*/\{\w+\}(?:/[a-z][A-Za-z]*(?:/\{\w+\})?)*")
UNNAMED = {"gpuscale.api.autoscaler.v1.ReportedMetric"}
"""Listed under the name of what they are about."""
UNCHECKED = {"gpuscale/Cordon", "gpuscale/Quota", "gpuscale/NodeProcess"}
"""Names of two patterns, or with a word in place of an id: the service checks them; or that no request takes."""
BY_A_RULE = ("missing", "not a UUID", "below", "not above", "above")
UUID = "0b5c5f0e-6f3e-4f6e-9d53-0e3c4e1c2a77"


pool: Any = DescriptorPool()  # of its own, as annotations are read
CONTRACT = resources.files("gpuscale.api").joinpath("contract.binpb").read_bytes()
for one_file in descriptor_pb2.FileDescriptorSet.FromString(CONTRACT).file:
    pool.AddSerializedFile(one_file.SerializeToString())
FILES = (
    GetMessageClass(pool.FindMessageTypeByName("google.protobuf.FileDescriptorSet")).FromString(CONTRACT).file
)
annotation = pool.FindExtensionByName


def messages() -> Iterator[tuple[str, DescriptorProto, dict[str, str]]]:
    """Each message of the public contract by its full name, with the comments of its fields."""
    for file in FILES:
        if file.package.startswith(PUBLIC):
            said = {tuple(one.path): one.leading_comments.strip() for one in file.source_code_info.location}
            for at, message in enumerate(file.message_type):
                comments = {one.name: said.get((4, at, 2, nth), "") for nth, one in enumerate(message.field)}
                yield f"{file.package}.{message.name}", message, comments


def behavior(field: Any) -> set[str]:
    extension = annotation("google.api.field_behavior")
    names = extension.enum_type.values_by_number
    return {names[one].name.lower() for one in field.options.Extensions[extension]}


def patterns(comment: str) -> list[str]:
    return sorted(set(PATTERN.findall(comment))) if PATTERN.match(comment) else []


def test_every_resource_has_a_type_the_patterns_of_its_name_and_an_identifier() -> None:
    found = {}
    for name, message, comments in messages():
        said = message.options.Extensions[annotation("google.api.resource")]
        if said.type:
            found[name] = said
            assert said.type.startswith("gpuscale/"), name
            assert sorted(said.pattern) == patterns(comments["name"]) != [], name
            assert "" not in {said.plural, said.singular}, name
            assert [one.name for one in message.field if "identifier" in behavior(one)] == ["name"], name
    types = {one.type: sorted(one.pattern) for one in found.values()}
    checked = {f"gpuscale/{kind}": [pattern] for kind, pattern in PATTERNS.items()}
    assert {kind: said for kind, said in types.items() if kind not in UNCHECKED} == checked
    named = {name for name, _, comments in messages() if "name" in comments}
    pages = [message for name, message, _ in messages() if re.search(r"\.List\w+Response$", name)]
    listed = {field.type_name.removeprefix(".") for page in pages for field in page.field}
    assert (listed & named) - found.keys() == UNNAMED


def test_what_is_said_to_be_a_name_refers_to_a_type() -> None:
    """Where a comment begins with a pattern; every type that is referred to is that of a resource."""
    of = {(pattern,): f"gpuscale/{kind}" for kind, pattern in PATTERNS.items()}
    of |= {("nodes/{node}/cordon", "nodes/{node}/gpus/{gpu}/cordon"): "gpuscale/Cordon"}
    of |= {("quotas/{tenant}",): "gpuscale/Quota"}
    strange = []
    for name, message, comments in messages():
        for field in message.field:
            if field.type == field.TYPE_STRING and "identifier" not in behavior(field):
                meant = patterns(comments[field.name])
                refers = field.options.Extensions[annotation("google.api.resource_reference")].type
                right_one = of.get(tuple(meant), "*" if len(meant) > 1 else "a resource")
                if refers != right_one if meant else refers not in {"", "*", *of.values()}:
                    strange.append(f"{name}.{field.name}: {meant}, {refers}")
    assert strange == []


def test_what_must_be_set_says_so_in_both_annotations() -> None:
    for name, message, _ in messages():
        for field in message.field:
            must = field.options.Extensions[annotation("buf.validate.field")].required
            said = behavior(field)
            assert must == ("required" in said) or "identifier" in said, f"{name}.{field.name}"


INTERNAL = {"DecisionInputs", "SnapshotDelta", "GpuNumbers", "StreamTelemetryRequest", "ConnectRequest"}


def test_what_our_programs_say_to_each_other_is_no_part_of_the_public_contract() -> None:
    texts = [path.read_text() for path in PROTOS.glob("gpuscale/internal/*/*/*.proto")]
    assert {word for text in texts for word in re.findall(r"\w+", text)} >= INTERNAL
    assert INTERNAL.isdisjoint(name.rpartition(".")[2] for name, _, _ in messages())
    public = [file for file in FILES if file.package.startswith(PUBLIC)]
    assert [file.name for file in public if "gpuscale/internal" in str(file.dependency)] == []


WATCHED = {"full", "removed", "resume_token", "reset"}
OWN_SHAPE = {"WatchSnapshots"}
"""The stream of one host's readings."""


def test_every_list_and_every_watch_has_the_same_shape() -> None:
    """What they tell of comes first, by which clients find it."""
    found = set[tuple[str, str, str]]()
    for rpc in rpcs():
        verb = re.match(r"List|Watch", rpc.method.name)
        if verb and rpc.method.full_name.startswith(PUBLIC) and rpc.method.name not in OWN_SHAPE:
            asked, told = set(rpc.method.input_type.fields_by_name), rpc.method.output_type.fields
            wanted = {
                "List": {"filter", "order_by", "page_size", "page_token"},
                "Watch": {"filter", "resume_token"},
            }
            assert asked >= wanted[verb[0]], rpc.path
            assert {one.name for one in told[1:]} >= (
                WATCHED if verb[0] == "Watch" else {"next_page_token"}
            ), rpc.path
            assert told[0].is_repeated, rpc.path
            found.add((verb[0], told[0].name, told[0].message_type.name))
    watched = {thing[1:] for thing in found if thing[0] == "Watch"}
    assert watched <= {thing[1:] for thing in found if thing[0] == "List"}
    assert len(watched) >= 12


@pytest.mark.parametrize(
    ("kind", "by"),
    [
        ("Cordon", "UncordonNode"),
        ("Backtest", "CancelBacktest"),
        ("Reservation", "ReleaseReservation"),
        ("Endpoint", "DeleteEndpoint"),
    ],
)
def test_work_that_outlives_its_call_has_a_state_is_listed_and_watched_and_ends_by(
    kind: str, by: str
) -> None:
    """As docs/api.md has it; a deletion itself is cancelled by nothing."""
    assert {f"List{kind}s", f"Watch{kind}s", by} <= {rpc.method.name for rpc in rpcs()}
    [message] = [message for name, message, _ in messages() if name.endswith(f".{kind}")]
    assert "state" in {one.name for one in message.field}


SENT: dict[str, tuple[str, dict[str, Any]]] = {
    "CreateEndpoint": ("endpoint", {"name": "endpoints/e", "spec": {"template": {"template": "worker"}}}),
    "CreateQueueWatcher": ("queue_watcher", {"name": "watchers/w", "spec": {"broker": "b", "queue": "q"}}),
    "SetQuota": ("quota", {"tenant": "t", "weight": 2}),
    "CreateBooking": (
        "booking",
        {
            "ask": {"gpu_count": 1, "gpu_milli": 1000},
            "start_time": "2100-01-01T00:00:00Z",
            "duration": "3600s",
        },
    ),
    "CreateUsePolicy": (
        "use_policy",
        {
            "name": "policies/p",
            "spec": {"condition": "USE_CONDITION_IDLE", "stages": [{"actions": ["POLICY_ACTION_NOTE"]}]},
        },
    ),
    "CreateNotificationTarget": (
        "notification_target",
        {"name": "targets/t", "spec": {"url": "http://example.invalid/", "secret": "0123456789abcdef"}},
    ),
    "CreatePowerBudget": (
        "power_budget",
        {"name": "budgets/b", "spec": {"watts": 900, "nodes": ["nodes/none"]}},
    ),
}
"""What makes a resource of each kind that callers send: the field of the request, and of the answer."""


def test_what_only_the_server_sets_is_ignored_where_a_caller_sends_it(tmp_path: Path) -> None:
    only_of_servers = {
        name: fields
        for name, message, _ in messages()
        if (fields := [one.name for one in message.field if "output_only" in behavior(one)])
    }
    methods = {rpc.method.name: rpc for rpc in rpcs()}
    (tmp_path / "up.toml").write_text('[brokers.b]\namqp_url = "amqp://u:p@127.0.0.1:1/"\n')
    (tmp_path / "up.toml").chmod(0o600)
    with (
        Up(tmp_path, simulate=1, arguments=("--config", str(tmp_path / "up.toml"))) as up,
        grpc.insecure_channel(up.address) as channel,
    ):
        for method, (field, body) in SENT.items():
            rpc = methods[method]
            request = right(rpc.request_class)
            resource = getattr(request, field)
            ParseDict(body, resource)
            fields = resource.DESCRIPTOR.fields_by_name
            for name in (outputs := only_of_servers.pop(resource.DESCRIPTOR.full_name)):
                fill(resource, fields[name])
                if fields[name].enum_type is not None:  # not the one that the server answers
                    setattr(resource, name, fields[name].enum_type.values[-1].number)
                if fields[name].message_type is Timestamp.DESCRIPTOR:
                    getattr(resource, name).seconds = 1
                if fields[name].message_type is not None and not str(getattr(resource, name)):
                    fill(getattr(resource, name), fields[name].message_type.fields[0])
            read = GetMessageClass(rpc.method.output_type).FromString
            answer = channel.unary_unary(rpc.path, None, read)(request.SerializeToString(), timeout=60)
            for name in outputs:
                assert getattr(getattr(answer, field), name) != getattr(resource, name), name
    assert only_of_servers == {}, "a resource that callers send is not in SENT"


@cache
def library() -> protovalidate.Validator:
    """protovalidate's own, with our predefined rule."""
    known = {file.name: file for file in FILES}

    def find(name: str) -> Any:
        if name == "buf/validate/validate.proto":
            return validate_pb.desc()
        return descriptor_pb.FileDescriptorProto.from_binary(known[name].SerializeToString())

    registry: Registry = create_file_registry(find("gpuscale/api/types/v1/rules.proto"), find)
    return protovalidate.Validator(registry=registry)


def refused(message: Any) -> set[str]:
    """The fields that the library refuses."""
    paths = (one.proto.field.elements for one in library().collect_violations(message))
    return {".".join(element.field_name for element in path) for path in paths}


@pytest.mark.parametrize("rpc", rpcs(), ids=lambda rpc: rpc.path)
def test_the_library_refuses_what_we_refuse_by_the_annotations(rpc: Rpc) -> None:
    assert refused(right(rpc.request_class)) == set()
    for field, what, request in wrong(rpc.request_class):
        if what.startswith(BY_A_RULE):
            assert field in refused(request), what


ASK = allocator_api.Ask(gpu_count=1)
TEXTS = [
    *["a", "A", "-a", "a.", "ä", "a:b/c"],
    "a b",
    " a",
    "a ",
    *["a\u00a0b", "a\u3000b", "a\ue000b", "a\x85", "a\x00b", "b\nc", ""],
    *[UUID, UUID + "0", UUID[:-1] + "g", UUID.replace("-", ""), UUID + "\n"],
    *("a" * n for n in (63, 64, 253, 254)),
]


@pytest.mark.parametrize("text", TEXTS)
def test_a_format_means_the_same_to_the_library(text: str) -> None:
    for message in (
        autoscaler_api.StatedCapabilitySet(id=text),
        allocator_api.ReserveRequest(request_id=UUID, ask=ASK, holder=text),
        monitor_api.AdmitWorkRequest(gpu_uuids=[text], reservation="reservations/a", fence=1),
        allocator_api.ReserveRequest(request_id=text, ask=ASK, holder="a", tenant=text),
    ):
        assert refused(message) == {re.sub(r"\[\d+\]", "", one.field) for one in violations(message)}
