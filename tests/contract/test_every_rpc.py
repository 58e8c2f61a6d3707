"""Every RPC of the contract answers bad input with the documented status, never UNKNOWN, and changes nothing.

The cases come from the descriptors, so an RPC that is added later is covered by itself. They run against `gpuscalectl up`
as a process of its own: what is tested is what users get.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tests.contract.descriptors import Rpc, right, rpcs, rules_of, wrong
from tests.support.up import Up

RPCS = rpcs()
UNARY = [rpc for rpc in RPCS if not rpc.client_streaming and not rpc.server_streaming]
EACH = pytest.mark.parametrize("rpc", RPCS, ids=lambda rpc: rpc.path)
EACH_UNARY = pytest.mark.parametrize("rpc", UNARY, ids=lambda rpc: rpc.path)


@pytest.fixture(scope="module")
def channel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[grpc.Channel]:
    """To a `gpuscalectl up` with simulated GPUs, which lives to the end and lists then what it listed at first."""
    with (
        Up(tmp_path_factory.mktemp("up"), simulate=4) as running,
        grpc.insecure_channel(running.address) as opened,
    ):
        before = listed(opened)
        yield opened
        assert listed(opened) == before
        assert running.process.poll() is None


def listed(channel: grpc.Channel) -> dict[str, list[str]]:
    """Names of everything the services keep."""
    found: dict[str, list[str]] = {}
    for rpc in (one for one in UNARY if one.method.name.startswith("List")):
        request: Any = rpc.request_class()
        if "show_ended" in rpc.method.input_type.fields_by_name:
            request.show_ended = True
        answer = channel.unary_unary(rpc.path, None, GetMessageClass(rpc.method.output_type).FromString)(
            request.SerializeToString(), timeout=60
        )
        for field, items in answer.ListFields():
            if field.is_repeated and field.message_type and "name" in field.message_type.fields_by_name:
                found[field.name] = [item.name for item in items]
    return found


def call(
    channel: grpc.Channel, rpc: Rpc, *payloads: bytes, timeout: float | None = 10
) -> tuple[str, grpc.RpcError | None]:
    """Send raw bytes and return (name of the status, the error). A server stream counts as OK at its first message."""
    try:
        if rpc.client_streaming:
            answers = channel.stream_stream(rpc.path)(iter(payloads), timeout=timeout)
        elif rpc.server_streaming:
            answers = channel.unary_stream(rpc.path)(payloads[0], timeout=timeout)
        else:
            channel.unary_unary(rpc.path)(payloads[0], timeout=timeout)
            return "OK", None
        next(iter(answers), None)
        answers.cancel()
    except grpc.RpcError as error:
        return error.code().name, error  # type: ignore[attr-defined]
    return "OK", None


def violated_fields(error: grpc.RpcError) -> list[str]:
    status = rpc_status.from_call(error)
    assert status is not None, "an error without google.rpc.Status"
    bad = error_details_pb2.BadRequest()
    for detail in status.details:
        if detail.Unpack(bad):
            return [violation.field for violation in bad.field_violations]
    return []


@EACH
def test_what_is_no_message(channel: grpc.Channel, rpc: Rpc) -> None:
    """Cut short, of a type that there is not, or text that is not UTF-8."""
    texts = [f for f in rpc.method.input_type.fields if f.type == f.TYPE_STRING and not f.is_repeated]
    not_utf8 = (bytes([field.number << 3 | 2, 2, 0xC3, 0x28]) for field in texts)
    for payload in (b"\xff\xff\xff\xff\xff", b"\x0a\x7fshort", b"\x08", *not_utf8):
        code, error = call(channel, rpc, payload)
        assert code == "INVALID_ARGUMENT", (payload, error)


@EACH
def test_random_bytes(channel: grpc.Channel, rpc: Rpc) -> None:
    """Some random bytes decode to a message with unknown fields; the answer is then a documented one, never UNKNOWN."""
    source = random.Random(rpc.path)
    for _ in range(12):
        code, error = call(channel, rpc, source.randbytes(source.randrange(1, 60)))
        assert code in {"OK", "INVALID_ARGUMENT"} | rpc.documented, error


@EACH_UNARY
def test_a_field_that_breaks_a_rule_is_named(channel: grpc.Channel, rpc: Rpc) -> None:
    for path, what, request in wrong(rpc.request_class):
        code, error = call(channel, rpc, request.SerializeToString())
        assert code == "INVALID_ARGUMENT", (path, what, error)
        fields = violated_fields(error)
        assert any(field == path or field.startswith(path + ".") for field in fields), (path, what, error)


def begins_with_hello(rpc: Rpc) -> bool:
    """Whether a request stream has a first message of its own kind; in others (KeepAlive) all are alike."""
    return rpc.client_streaming and not rpc.method.input_type.fields[0].is_repeated


def has_kinds_of_messages(rpc: Rpc) -> bool:
    """Whether its messages are members of a oneof."""
    return begins_with_hello(rpc) and bool(rpc.method.input_type.oneofs)


@pytest.mark.parametrize("rpc", [rpc for rpc in RPCS if begins_with_hello(rpc)], ids=lambda rpc: rpc.path)
def test_a_first_message_that_breaks_a_rule(channel: grpc.Channel, rpc: Rpc) -> None:
    first = rpc.method.input_type.fields[0].name
    cases = [case for case in wrong(rpc.request_class) if case[0].startswith(first + ".")]
    assert cases
    for path, what, request in cases:
        code, error = call(channel, rpc, request.SerializeToString())
        assert code == "INVALID_ARGUMENT", (path, what, error)
        assert path in violated_fields(error), (path, what, error)


@pytest.mark.parametrize("rpc", [rpc for rpc in RPCS if has_kinds_of_messages(rpc)], ids=lambda rpc: rpc.path)
def test_a_stream_that_begins_with_the_wrong_message(channel: grpc.Channel, rpc: Rpc) -> None:
    second = rpc.request_class()
    getattr(second, rpc.method.input_type.fields[1].name).SetInParent()
    for payloads in ((second.SerializeToString(),), (b"",), ()):
        code, error = call(channel, rpc, *payloads)
        assert code == "FAILED_PRECONDITION", error


def named_resources(rpc: Rpc) -> list[str]:
    """Required fields of the request that name a resource that is there already."""
    if rpc.method.name == "Join":
        return []
    return [f.name for f in rpc.method.input_type.fields if rules_of(f).resource and rules_of(f).required]


@pytest.mark.parametrize("rpc", [rpc for rpc in UNARY if named_resources(rpc)], ids=lambda rpc: rpc.path)
def test_an_unknown_name(channel: grpc.Channel, rpc: Rpc) -> None:
    assert "NOT_FOUND" in rpc.documented, "the comment of the RPC must say so"
    code, error = call(channel, rpc, right(rpc.request_class).SerializeToString())
    assert code == "NOT_FOUND", error


def test_a_page_token_that_nobody_gave(channel: grpc.Channel) -> None:
    lists = [rpc for rpc in UNARY if "page_token" in rpc.method.input_type.fields_by_name]
    assert lists
    for rpc in lists:
        code, error = call(channel, rpc, rpc.request_class(page_token="bm90LWEtdG9rZW4").SerializeToString())  # type: ignore[call-arg]
        assert code == "INVALID_ARGUMENT", (rpc.path, error)
        assert violated_fields(error) == ["page_token"]


READS = [rpc for rpc in RPCS if rpc.method.name.startswith(("Get", "List", "Watch"))]


@pytest.mark.parametrize("rpc", READS, ids=lambda rpc: rpc.path)
def test_no_deadline(channel: grpc.Channel, rpc: Rpc) -> None:
    """Without a deadline the server imposes one, and answers."""
    code, error = call(channel, rpc, right(rpc.request_class).SerializeToString(), timeout=None)
    assert code in {"OK", "NOT_FOUND"} | (rpc.documented & {"FAILED_PRECONDITION"}), error
