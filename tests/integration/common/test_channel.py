"""Channels: tokens, reconnecting, and what they refuse."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from pydantic import SecretStr

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common import errors
from gpuscale.common.rpc.channel import open_channel, open_sync_channel
from gpuscale.common.rpc.server import Server, ServerOptions
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.security.auth import Authenticator, current_principal
from gpuscale.internal.monitor import v1 as monitor_internal
from tests.support.throwaway import Allocator, Fleet, Served, registrations, serve
from tests.support.tokens import token, write_tokens

ALICE = SecretStr(token("alice"))


def authenticator(folder: Path) -> Authenticator:
    return Authenticator(tokens_file=write_tokens(folder / "tokens.toml", alice="operator"))


@pytest.mark.parametrize(
    "address", ["gpu-01:7070", "192.0.2.1:7070", "[2001:db8::1]:7070", "dns:///localhost:1"]
)
@pytest.mark.parametrize("open_one", [open_channel, open_sync_channel])
async def test_a_token_is_not_sent_over_plain_text(address: str, open_one: Any) -> None:
    with pytest.raises(errors.FailedPreconditionError) as caught:
        open_one(address, token=ALICE)
    assert caught.value.reason == "INSECURE_TRANSPORT"
    assert token("alice") not in caught.value.message


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:1", "[::1]:1", "unix:/nowhere"])
async def test_a_token_may_be_sent_to_this_host(address: str) -> None:
    async with open_channel(address, token=ALICE):
        pass
    with open_sync_channel(address, token=ALICE):
        pass


async def test_a_token_goes_along_with_every_kind_of_call(tmp_path: Path) -> None:
    callers: list[str] = []
    more: list[bool] = []

    async def work(request: Any, context: Any) -> Any:
        callers.append(current_principal().name)
        more.append(("x-more", "metadata") in context.invocation_metadata())
        return Allocator.answer()

    async def nodes(request: Any, context: Any) -> AsyncIterator[Any]:
        callers.append(current_principal().name)
        yield monitor_api.WatchNodesResponse(full=True)

    async def telemetry(requests: Any, context: Any) -> AsyncIterator[Any]:
        callers.append(current_principal().name)
        async for _ in requests:
            yield monitor_internal.StreamTelemetryResponse(acked_seq=5)

    rooms = {"authenticator": authenticator(tmp_path)}
    async with serve(Allocator(work), Fleet(nodes, telemetry), **rooms) as served:  # type: ignore[arg-type]
        async with open_channel(served.address, token=ALICE) as channel:
            mine = Served(served.server, served.address, channel)
            await mine.release(metadata=(("x-more", "metadata"),))
            assert (await mine.fleet.WatchNodes(monitor_api.WatchNodesRequest()).read()).full
            stream = mine.telemetry.StreamTelemetry()
            await stream.write(monitor_internal.StreamTelemetryRequest())
            assert (await stream.read()).acked_seq == 5
            await stream.done_writing()
            assert await stream.code() == grpc.StatusCode.OK
        assert callers == ["alice"] * 3
        assert more == [True]
        await asyncio.to_thread(call_without_a_loop, served.address)
        assert callers == ["alice"] * 7


def call_without_a_loop(address: str) -> None:
    request = allocator_api.GetReservationRequest(name="reservations/r")
    with open_sync_channel(address, token=ALICE) as channel:
        allocator, fleet = allocator_api.AllocatorServiceStub(channel), monitor_api.FleetServiceStub(channel)
        allocator.GetReservation(request, timeout=30)
        allocator.GetReservation.with_call(request, timeout=30)
        allocator.GetReservation.future(request, timeout=30).result()
        assert [answer.full for answer in fleet.WatchNodes(monitor_api.WatchNodesRequest(), timeout=30)] == [
            True
        ]


async def test_a_channel_finds_its_server_again() -> None:
    async with serve() as served, open_channel(served.address) as channel:
        mine = Served(served.server, served.address, channel)
        await mine.get()
        await served.server.stop()
        with pytest.raises(errors.UnavailableError), rpc_errors():
            await mine.get()
        again = Server(ServerOptions(listen=served.address), Authenticator())
        again.add(*registrations(Allocator(), Fleet()))
        again.bind()
        async with again:
            await mine.get(wait_for_ready=True, timeout=30)
