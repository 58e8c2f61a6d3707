"""Single promises of the interceptor, and what reaches streams that are open for long."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common import errors
from gpuscale.common.rpc import interceptor
from gpuscale.common.rpc.interceptor import Guard, GuardSettings, OpenCalls
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.rpc.validation import violations
from gpuscale.common.secrets import DatabaseUnavailableError
from gpuscale.common.security import auth
from gpuscale.common.security.auth import Authenticator, find_method
from gpuscale.internal.monitor import v1 as monitor_internal
from tests.support.throwaway import Allocator, Fleet, read_to_the_end, serve
from tests.support.tokens import authenticator, bearer, write_tokens

UUID = "01234567-89ab-cdef-0123-456789abcdef"
PATH = "/gpuscale.api.allocator.v1.AllocatorService/GetReservation"
GET = allocator_api.GetReservationRequest(name="reservations/r").SerializeToString()


class AbortedError(Exception):
    """What the context below raises when a call is ended."""


class Context:
    """A call over loopback with `remaining` seconds left."""

    def __init__(self, remaining: float | None) -> None:
        self._remaining = remaining
        self.code: grpc.StatusCode | None = None

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def time_remaining(self) -> float | None:
        return self._remaining

    def done(self) -> bool:
        return self.code is not None

    def set_trailing_metadata(self, metadata: Any) -> None:
        pass

    async def abort_with_status(self, status: Any) -> None:
        self.code = status.code
        raise AbortedError


def guarded(work: Any, calls: OpenCalls | None = None) -> Any:
    settings = GuardSettings(Authenticator(), calls or OpenCalls(10), 30.0)
    handler = grpc.unary_unary_rpc_method_handler(
        work,
        allocator_api.GetReservationRequest.FromString,
        allocator_api.GetReservationResponse.SerializeToString,
    )
    return Guard(PATH, find_method(PATH), handler, settings).handler.unary_unary


async def test_a_call_whose_deadline_has_passed_is_not_begun() -> None:
    worked: list[Any] = []

    async def work(request: Any, context: Any) -> Any:
        worked.append(request)
        return allocator_api.GetReservationResponse()

    late, early = Context(0.0), Context(0.001)
    with pytest.raises(AbortedError):
        await guarded(work)(GET, late)
    assert late.code == grpc.StatusCode.DEADLINE_EXCEEDED
    assert worked == []
    await guarded(work)(GET, early)
    assert len(worked) == 1


async def test_calls_are_counted_only_while_they_run() -> None:
    calls = OpenCalls(10)
    open_calls: list[int] = []

    async def work(request: Any, context: Any) -> Any:
        open_calls.append(len(calls.unary))
        if request.name.endswith("wrong"):
            raise errors.NotFoundError("none")
        return allocator_api.GetReservationResponse()

    await guarded(work, calls)(GET, Context(None))
    wrong = allocator_api.GetReservationRequest(name="reservations/wrong").SerializeToString()
    with pytest.raises(AbortedError):
        await guarded(work, calls)(wrong, Context(None))
    assert open_calls == [1, 1]
    assert not calls.unary


async def test_only_admins_are_told_what_the_database_says(tmp_path: Path) -> None:
    """It may name its address."""

    async def work(request: Any, context: Any) -> Any:
        raise DatabaseUnavailableError("PostgreSQL at 10.0.0.5: gone", reason="STATE_UNAVAILABLE")

    roles, told = {"ann": "admin", "bob": "operator"}, {}
    async with serve(Allocator(work), authenticator=authenticator(tmp_path, **roles)) as served:
        for name in ("ann", "bob"):
            with pytest.raises(errors.UnavailableError) as caught, rpc_errors():
                await served.allocator.GetReservation(
                    allocator_api.GetReservationRequest(name="reservations/r"),
                    metadata=bearer(name),
                    timeout=30,
                )
            told[name] = (caught.value.message, caught.value.reason)
    assert told == {
        "ann": ("PostgreSQL at 10.0.0.5: gone", "STATE_UNAVAILABLE"),
        "bob": ("the state cannot be used now", "STATE_UNAVAILABLE"),
    }


async def test_a_handler_that_is_not_async_is_not_implemented() -> None:
    """Generated code puts such methods in place of those that a servicer lacks."""
    async with serve(Allocator()) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.allocator.ListReservations(allocator_api.ListReservationsRequest(), timeout=30)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_a_generator_is_closed_before_the_call_ends() -> None:
    """Not when it happens to be collected: what it holds is free at once."""
    closed: list[bool] = []

    async def nodes(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            yield monitor_api.WatchNodesResponse()
        finally:
            await asyncio.sleep(0)
            closed.append(True)

    class Gone(Context):
        async def write(self, message: Any) -> None:
            raise grpc.aio.InternalError("the connection is gone")

    path = "/gpuscale.api.monitor.v1.FleetService/WatchNodes"
    settings = GuardSettings(Authenticator(), OpenCalls(10), 30.0)
    guard = Guard(path, find_method(path), grpc.unary_stream_rpc_method_handler(nodes), settings)
    with pytest.raises(grpc.aio.InternalError):
        await guard.handler.unary_stream(b"", Gone(None))  # type: ignore[misc, arg-type]
    assert closed == [True]


async def test_a_handler_that_aborts_by_itself_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """As a gateway does, which passes the status of another server on."""

    async def work(request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.DATA_LOSS, "as it came", (("x-key", "value"),))

    async with serve(Allocator(work)) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.get()
    assert caught.value.code() == grpc.StatusCode.DATA_LOSS
    assert caught.value.details() == "as it came"
    assert dict(caught.value.trailing_metadata() or ())["x-key"] == "value"
    assert caplog.records == []


@pytest.mark.parametrize(
    ("change", "error"), [("revoked", errors.UnauthenticatedError), ("lowered", errors.PermissionDeniedError)]
)
async def test_a_stream_ends_soon_after_its_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, error: type[errors.GpuscaleError]
) -> None:
    """The real period is a minute."""
    monkeypatch.setattr(interceptor, "RECHECK_PERIOD", 0.05)
    monkeypatch.setattr(auth, "CHECK_PERIOD", 0.01)
    path = write_tokens(tmp_path / "tokens.toml", alice="agent", bob="viewer")
    async with serve(authenticator=Authenticator(tokens_file=path)) as served:
        stays = served.fleet.WatchNodes(monitor_api.WatchNodesRequest(), metadata=bearer("bob"))
        ends = served.telemetry.StreamTelemetry(metadata=bearer("alice"))
        await ends.write(monitor_internal.StreamTelemetryRequest())
        await ends.read()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(ends.code()), 0.3)
        write_tokens(path, bob="viewer", **({} if change == "revoked" else {"alice": "viewer"}))
        async with asyncio.timeout(60):
            with pytest.raises(error):
                await read_to_the_end(ends)
        assert (await stays.read()).full
        assert await stays.code() == grpc.StatusCode.OK


async def test_messages_of_a_request_stream_are_not_validated_for_the_service() -> None:
    """A wrong one may be dropped instead, so the service looks for itself."""
    seen: list[list[str]] = []

    async def telemetry(requests: Any, context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            seen.append([violation.field for violation in violations(request)])
            yield monitor_internal.StreamTelemetryResponse(rejected_count=len(seen[-1]))

    async with serve(fleet=Fleet(telemetry=telemetry)) as served:
        call = served.telemetry.StreamTelemetry()
        for node in ("n", "not an id"):
            await call.write(monitor_internal.StreamTelemetryRequest(hello={"node": node, "epoch": UUID}))
        assert [(await call.read()).rejected_count for _ in range(2)] == [0, 1]
        await call.done_writing()
        assert await call.code() == grpc.StatusCode.OK
    assert seen == [[], ["hello.node"]]


async def test_a_generator_is_closed_when_its_subscriber_leaves() -> None:
    """While it waits, and while it is suspended in a write: its clean-up runs at once, not when it is collected."""
    begun, closed = asyncio.Event(), asyncio.Event()

    async def nodes(request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            while True:
                yield monitor_api.WatchNodesResponse(nodes=[monitor_api.Node(name="x" * 1_000_000)])
                begun.set()
        finally:
            closed.set()

    async with serve(fleet=Fleet(nodes)) as served:
        call = served.fleet.WatchNodes(monitor_api.WatchNodesRequest())
        await begun.wait()
        call.cancel()
        async with asyncio.timeout(60):
            await closed.wait()
