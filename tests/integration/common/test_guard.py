"""Single promises of the guard that a real connection cannot be made to show at will."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common import errors
from gpuscale.common.rpc.calls import OpenCalls
from gpuscale.common.rpc.interceptor import Guard, GuardSettings
from gpuscale.common.security.auth import Authenticator, find_method
from tests.support.throwaway import Allocator, serve

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

    def time_remaining(self) -> float | None:
        return self._remaining

    def done(self) -> bool:
        return self.code is not None

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


async def test_a_handler_that_is_not_async_is_not_implemented() -> None:
    """Generated code puts such methods in place of those that a servicer lacks."""
    async with serve(Allocator()) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.allocator.ListReservations(allocator_api.ListReservationsRequest(), timeout=5)
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_a_method_that_nobody_serves_is_not_implemented() -> None:
    async with serve() as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.channel.unary_unary("/gpuscale.api.allocator.v1.AllocatorService/NoSuch")(
                b"", timeout=5
            )
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
