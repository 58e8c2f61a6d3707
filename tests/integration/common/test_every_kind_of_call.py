"""What holds for every RPC holds for all four kinds, on a real server: roles, decoding, errors, ids."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.common import errors
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.rpc.interceptor import request_id_of
from gpuscale.common.rpc.server import Server, ServerOptions
from gpuscale.common.rpc.status import REQUEST_ID_KEY, from_rpc_error
from gpuscale.common.rpc.wrapped_channel import sending
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.security.auth import Authenticator, Principal, Role, current_principal
from gpuscale.internal.autoscaler import v1 as autoscaler_internal
from gpuscale.internal.monitor import v1 as monitor_internal
from tests.support.tokens import authenticator, bearer

Work = Callable[[Any], Awaitable[Any]]
UUID = "01234567-89ab-cdef-0123-456789abcdef"


@dataclass(frozen=True)
class Kind:
    """A method of the contract (its role counts, its own kind does not), served as some kind of handler."""

    name: str
    service: str
    method: str
    request: Any
    response: Any

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.method}"

    def handler(self, work: Work, *, raw: bool = False) -> Any:
        """A handler that does `work` for each request and answers with what it returns."""

        async def one(request: Any, context: Any) -> Any:
            return await work(request)

        async def many(request: Any, context: Any) -> AsyncIterator[Any]:
            yield await work(request)

        async def last(requests: Any, context: Any) -> Any:
            return [await work(request) async for request in requests][-1]

        async def each(requests: Any, context: Any) -> AsyncIterator[Any]:
            async for request in requests:
                yield await work(request)

        behavior = {"unary_unary": one, "unary_stream": many, "stream_unary": last, "stream_stream": each}
        make = getattr(grpc, f"{self.name}_rpc_method_handler")
        if raw:
            return make(behavior[self.name])
        request_class = type(self.request)
        return make(
            behavior[self.name], request_class.FromString, lambda message: message.SerializeToString()
        )

    async def refused(self, channel: grpc.aio.Channel, **options: Any) -> errors.GpuscaleError:
        """Why a call is refused before anything is read. Nothing is written to a stream: gRPC core may say INTERNAL then."""
        multi = getattr(channel, self.name)(self.path)
        payload = None if self.name.startswith("stream") else self.request.SerializeToString()
        call = multi(payload, timeout=60.0, **options)
        return await failure(anext(aiter(call)) if self.name.endswith("stream") else call)

    async def call(self, channel: grpc.aio.Channel, *payloads: bytes, **options: Any) -> bytes:
        """Send bytes; returns the first answer and waits for the status."""
        multi = getattr(channel, self.name)(self.path)
        options = {"timeout": 10.0, **options}
        requests = payloads or (self.request.SerializeToString(),)
        sends = self.name.startswith("stream")
        call = multi(None if sends else requests[0], **options)
        async with sending(call, flowing(*requests)) if sends else nullcontext():
            if self.name.endswith("unary"):
                return await call
            first, *_ = [answer async for answer in call]
        return first


async def flowing(*requests: bytes) -> AsyncIterator[bytes]:
    for request in requests:
        yield request


KINDS = (
    Kind(
        "unary_unary",
        "gpuscale.api.allocator.v1.AllocatorService",
        "ReleaseReservation",
        allocator_api.ReleaseReservationRequest(name="reservations/r", fence=1),
        allocator_api.ReleaseReservationResponse(),
    ),
    Kind(
        "unary_stream",
        "gpuscale.api.autoscaler.v1.EndpointService",
        "DeleteEndpoint",
        autoscaler_api.DeleteEndpointRequest(name="endpoints/e"),
        autoscaler_api.DeleteEndpointResponse(),
    ),
    Kind(
        "stream_unary",
        "gpuscale.internal.autoscaler.v1.AdapterStreamService",
        "Connect",
        autoscaler_internal.ConnectRequest(register={"adapter": "a", "kind": "process"}),
        autoscaler_internal.ConnectResponse(revision=7),
    ),
    Kind(
        "stream_stream",
        "gpuscale.internal.monitor.v1.TelemetryService",
        "StreamTelemetry",
        monitor_internal.StreamTelemetryRequest(hello={"node": "n", "epoch": UUID}),
        monitor_internal.StreamTelemetryResponse(acked_seq=7),
    ),
)
EACH = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


@asynccontextmanager
async def serving(
    kind: Kind, work: Work, authenticator: Authenticator | None = None, *, raw: bool = False
) -> AsyncIterator[str]:
    server = Server(ServerOptions(), authenticator or Authenticator())
    handlers = {kind.method: kind.handler(work, raw=raw)}
    server.add_generic(grpc.method_handlers_generic_handler(kind.service, handlers), [kind.service])
    address = server.bind()
    async with server:
        yield address


@asynccontextmanager
async def served(*args: Any, **kwargs: Any) -> AsyncIterator[grpc.aio.Channel]:
    async with serving(*args, **kwargs) as address, open_channel(address) as channel:
        yield channel


async def failure(call: Awaitable[Any]) -> errors.GpuscaleError:
    """The error that a call ends with. Its message must not give away more than it should."""
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return from_rpc_error(caught.value)


@EACH
async def test_a_call_is_answered(kind: Kind) -> None:
    seen: list[Any] = []

    async def work(request: Any) -> Any:
        seen.append((request, current_principal()))
        return kind.response

    async with served(kind, work) as channel:
        assert await kind.call(channel) == kind.response.SerializeToString()
    assert seen == [(kind.request, Principal("local", Role.ADMIN, "local"))]


@pytest.mark.parametrize(
    "kind", [one for one in KINDS if one.name.endswith("stream")], ids=lambda kind: kind.name
)
async def test_a_stream_takes_messages_that_are_encoded_already(kind: Kind) -> None:
    async def work(_: Any) -> bytes:
        return kind.response.SerializeToString()

    async with served(kind, work) as channel:
        assert await kind.call(channel) == kind.response.SerializeToString()


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ((("gpuscale-request-id", "of-a_Caller.7"),), "of-a_Caller.7"),
        ((("x-request-id", "0af7651916cd43dd"),), "0af7651916cd43dd"),
        ((("gpuscale-request-id", "two words"), ("x-request-id", "plain")), "plain"),
        ((("x-request-id", "a" * 65),), None),
        ((("x-request-id", '{"event": "forged"}'),), None),
        ((), None),
    ],
)
def test_the_id_of_a_caller_is_kept_where_it_is_plain(sent: Any, kept: str | None) -> None:
    found = request_id_of(sent)
    assert re.fullmatch("[A-Za-z0-9._-]{1,64}", found)
    assert kept in {found, None}


@EACH
@pytest.mark.parametrize("fails", [False, True])
async def test_a_call_has_one_id(kind: Kind, caplog: pytest.LogCaptureFixture, fails: bool) -> None:
    """In every line of its log, and at its end, however it ends."""

    async def work(request: Any) -> Any:
        get_logger("gpuscale.test").warning("looked")
        if fails:
            raise errors.NotFoundError("gone")
        return kind.response

    async with served(kind, work) as channel:
        call = getattr(channel, kind.name)(kind.path)
        one = kind.request.SerializeToString()
        sends = kind.name.startswith("stream")
        begun = call(None if sends else one, metadata=(("x-request-id", "of-a_Caller.7"),), timeout=60)
        async with sending(begun, flowing(one)) if sends else nullcontext():
            if kind.name.endswith("stream"):
                with suppress(grpc.aio.AioRpcError):
                    assert [answer async for answer in begun]
            assert await begun.code() == (grpc.StatusCode.NOT_FOUND if fails else grpc.StatusCode.OK)
        assert dict(await begun.trailing_metadata())[REQUEST_ID_KEY] == "of-a_Caller.7"
    [line] = [record.msg for record in caplog.records if record.name == "gpuscale.test"]
    assert isinstance(line, dict)
    assert line["request_id"] == "of-a_Caller.7"


@EACH
async def test_raw_handlers_get_and_give_bytes(kind: Kind) -> None:
    async def work(request: Any) -> Any:
        assert request == b"\xff\xff no message"
        return b"\xfe neither"

    async with served(kind, work, raw=True) as channel:
        assert await kind.call(channel, b"\xff\xff no message") == b"\xfe neither"


def nested(levels: int) -> bytes:
    """Unknown groups within each other: more than protobuf's limit of 100 is malformed."""
    return b"\x7b" * levels + b"\x7c" * levels


@EACH
async def test_bytes_that_are_no_message(kind: Kind) -> None:
    """Also as a later message of a request stream."""

    async def work(request: Any) -> Any:
        return kind.response

    streams, good = kind.name.startswith("stream"), kind.request.SerializeToString()
    # Of a stream it is one level down.
    no_text = b"\x0a\x04\x0a\x02\xc3\x28" if streams else b"\x0a\x02\xc3\x28"
    async with served(kind, work) as channel:
        for payload in (b"\xff\xff\xff\xff\xff", b"\x0a\x7fshort", no_text, nested(200)):
            for before in ([], [good] * 2) if streams else ([],):
                error = await failure(kind.call(channel, *before, payload))
                assert (type(error), error.reason) == (errors.InvalidArgumentError, "MALFORMED_MESSAGE"), (
                    payload
                )


@EACH
@pytest.mark.parametrize("grouped", [False, True], ids=["by itself", "out of a task group"])
async def test_errors_of_the_tree_keep_their_details(kind: Kind, grouped: bool) -> None:
    async def fail() -> None:
        raise errors.ResourceExhaustedError(
            "no room", reason="NO_CAPACITY", metadata={"a": "b"}, retry_after=2.5
        )

    async def work(request: Any) -> Any:
        if not grouped:
            await fail()
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())

    async with served(kind, work) as channel:
        error = await failure(kind.call(channel))
    assert isinstance(error, errors.ResourceExhaustedError)
    assert (error.message, error.reason, error.metadata, error.retry_after) == (
        "no room",
        "NO_CAPACITY",
        {"a": "b"},
        2.5,
    )


async def raises(request: Any) -> Any:
    """M1: the text, which may hold a secret, only stands in the log."""
    raise ValueError("amqp://user:s3cret@host/ failed")


async def leaks_a_cancellation(request: Any) -> Any:
    """M2: gRPC would never answer."""
    inner = asyncio.create_task(asyncio.sleep(60))
    await asyncio.sleep(0)
    inner.cancel()
    await inner


async def answers_with_no_message(request: Any) -> Any:
    return None


@EACH
@pytest.mark.parametrize("bug", [raises, leaks_a_cancellation, answers_with_no_message])
async def test_a_bug_is_told_by_the_id_of_its_request(
    kind: Kind, caplog: pytest.LogCaptureFixture, bug: Work
) -> None:
    async with served(kind, bug) as channel:
        with caplog.at_level(logging.ERROR):
            error = await failure(kind.call(channel, timeout=60.0))
    assert isinstance(error, errors.InternalError)
    assert error.message == f"internal error, request {error.metadata['request_id']}"
    (record,) = [record for record in caplog.records if record.name == "gpuscale.common.rpc.interceptor"]
    assert error.metadata["request_id"] in str(record.msg)
    assert record.exc_info or "exc_info" in str(record.msg)


@EACH
async def test_a_caller_that_gives_up_cancels_the_handler(
    kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    """Which is nothing to be noted."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def work(request: Any) -> Any:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async with served(kind, work) as channel:
        call = asyncio.create_task(kind.call(channel))
        await begun.wait()
        call.cancel()
        async with asyncio.timeout(60):
            await ended.wait()
        await asyncio.gather(call, return_exceptions=True)
    assert caplog.records == []


@EACH
async def test_the_role_must_do(kind: Kind, tmp_path: Path) -> None:
    """And a call that is refused has no effect."""
    worked: list[str] = []

    async def work(request: Any) -> Any:
        worked.append(current_principal().name)
        return kind.response

    roles = {
        "low": "viewer",
        "right": "agent" if kind.name.startswith("stream") else "operator",
        "top": "admin",
    }
    async with served(kind, work, authenticator(tmp_path, **roles)) as channel:
        error = await kind.refused(channel, metadata=bearer("low"))
        assert (type(error), error.reason) == (errors.PermissionDeniedError, "ROLE_TOO_LOW")
        error = await kind.refused(channel)
        assert (type(error), error.reason) == (errors.UnauthenticatedError, "TOKEN_MISSING")
        error = await kind.refused(channel, metadata=bearer("nobody"))
        assert (type(error), error.reason) == (errors.UnauthenticatedError, "TOKEN_INVALID")
        assert worked == []
        await kind.call(channel, metadata=bearer("right"))
        await kind.call(channel, metadata=bearer("top"))
    assert worked == ["right", "top"]


@EACH
async def test_a_method_without_a_role_is_refused_to_everybody(kind: Kind) -> None:
    async def work(request: Any) -> Any:
        return kind.response

    unknown = Kind(kind.name, "example.Unknown", "Do", kind.request, kind.response)
    async with served(unknown, work) as channel:
        error = await unknown.refused(channel)
    assert (type(error), error.reason) == (errors.PermissionDeniedError, "METHOD_WITHOUT_ROLE")
