"""A gateway whose upstream is two servers forwards to the one that leads, and sends no token to another host."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.rpc.server import Server, ServerOptions
from gpuscale.common.security.auth import Authenticator
from gpuscale.gateway.main import open_gateway
from gpuscale.gateway.settings import GatewaySettings
from tests.support.ports import free_port
from tests.support.standby import Pair, two_servers

GET = allocator_api.GetReservationRequest(name="reservations/r")
WATCH = monitor_api.WatchNodesRequest()


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async with two_servers() as servers:
        servers.lead(servers.second)
        yield servers


@asynccontextmanager
async def gateway(addresses: str) -> AsyncIterator[str]:
    """The address of a gateway to them."""
    settings = GatewaySettings(
        fleet_address=addresses, allocator_address=addresses, autoscaler_address=f"127.0.0.1:{free_port()}"
    )
    server = Server(ServerOptions(), Authenticator())
    address = server.bind()
    async with open_gateway(settings) as (forwarder, services):
        server.add_generic(forwarder, services)
        async with server:
            yield address


async def test_the_gateway_forwards_to_the_leader(pair: Pair) -> None:
    async with gateway(pair.addresses) as address, open_channel(address) as channel:
        stub: Any = allocator_api.AllocatorServiceStub(channel)
        await stub.GetReservation(GET, timeout=60.0)
        fleet: Any = monitor_api.FleetServiceStub(channel)
        assert [message.full async for message in fleet.WatchNodes(WATCH)] == [True]
    assert pair.second.calls == ["unary", "nodes"]
    assert pair.first.calls == ["unary", "nodes"]


async def test_a_token_stays_where_one_of_the_upstreams_is_on_another_host(pair: Pair) -> None:
    """Plain text to another host could be read on the way."""
    for addresses, passes in ((pair.addresses, True), (f"{pair.second.address},192.0.2.1:7073", False)):
        async with gateway(addresses) as address, open_channel(address) as channel:
            stub: Any = allocator_api.AllocatorServiceStub(channel)
            await stub.GetReservation(GET, timeout=60.0, metadata=(("authorization", "Bearer abc"),))
        assert ("authorization" in pair.second.metadata) is passes
