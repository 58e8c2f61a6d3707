"""Streams live long: what changes meanwhile must reach them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common import errors
from gpuscale.common.rpc import interceptor
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.rpc.validation import violations
from gpuscale.common.security import auth as tokens
from gpuscale.common.security.auth import Authenticator
from tests.support.throwaway import Fleet, serve
from tests.support.tokens import bearer, write_tokens

UUID = "01234567-89ab-cdef-0123-456789abcdef"


async def endless(request: Any, context: Any) -> AsyncIterator[Any]:
    yield monitor_api.WatchNodesResponse()
    await asyncio.Event().wait()


async def read_to_the_end(call: Any) -> None:
    with rpc_errors():
        while await call.read():
            pass


@pytest.mark.parametrize(
    ("change", "error"), [("revoked", errors.UnauthenticatedError), ("lowered", errors.PermissionDeniedError)]
)
async def test_a_stream_ends_soon_after_its_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, error: type[errors.GpuscaleError]
) -> None:
    """The real period is a minute."""
    monkeypatch.setattr(interceptor, "RECHECK_PERIOD", 0.05)
    monkeypatch.setattr(tokens, "CHECK_PERIOD", 0.01)
    path = write_tokens(tmp_path / "tokens.toml", alice="agent", bob="viewer")
    async with serve(authenticator=Authenticator(tokens_file=path)) as served:
        stays = served.fleet.WatchNodes(monitor_api.WatchNodesRequest(), metadata=bearer("bob"))
        ends = served.fleet.StreamTelemetry(metadata=bearer("alice"))
        await ends.write(monitor_api.StreamTelemetryRequest())
        await ends.read()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(ends.code()), 0.3)
        write_tokens(path, bob="viewer", **({} if change == "revoked" else {"alice": "viewer"}))
        async with asyncio.timeout(5):
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
            yield monitor_api.StreamTelemetryResponse(rejected_count=len(seen[-1]))

    async with serve(fleet=Fleet(telemetry=telemetry)) as served:
        call = served.fleet.StreamTelemetry()
        for node in ("n", "not an id"):
            await call.write(monitor_api.StreamTelemetryRequest(hello={"node": node, "epoch": UUID}))
        assert [(await call.read()).rejected_count for _ in range(2)] == [0, 1]
        await call.done_writing()
        assert await call.code() == grpc.StatusCode.OK
    assert seen == [[], ["hello.node"]]


async def test_the_request_of_a_server_stream_is_validated() -> None:
    request = monitor_api.WatchNodesRequest()
    request.min_interval.FromSeconds(61)
    async with serve() as served:
        with pytest.raises(errors.InvalidArgumentError) as caught:
            await read_to_the_end(served.fleet.WatchNodes(request))
    assert [field for field, _ in caught.value.violations] == ["min_interval"]


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
        async with asyncio.timeout(5):
            await closed.wait()


async def test_an_error_in_the_middle_of_a_stream_ends_it_with_its_status() -> None:
    async def nodes(request: Any, context: Any) -> AsyncIterator[Any]:
        yield monitor_api.WatchNodesResponse(full=True)
        raise errors.AbortedError("taken over", reason="TAKEN_OVER")

    async with serve(fleet=Fleet(nodes)) as served:
        call = served.fleet.WatchNodes(monitor_api.WatchNodesRequest())
        assert (await call.read()).full
        with pytest.raises(errors.AbortedError, match="taken over"):
            await read_to_the_end(call)
