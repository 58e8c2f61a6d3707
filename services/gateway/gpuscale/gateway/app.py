"""The gateway put together: a channel to each upstream and the forwarder over them."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from gpuscale.common.rpc.server import parse_listen
from gpuscale.common.rpc.wrapped_channel import split_addresses
from gpuscale.gateway.forwarder import Forwarder
from gpuscale.gateway.settings import GatewaySettings
from gpuscale.gateway.upstreams import SERVICES, Lanes, Upstream


@asynccontextmanager
async def open_gateway(settings: GatewaySettings) -> AsyncGenerator[tuple[Forwarder, tuple[str, ...]], None]:
    """The forwarder and the names of the services it serves; channels are open until the block ends.

    Raises:
        FailedPreconditionError: a file of TLS cannot be read.
        InvalidArgumentError: an upstream's address is none.
    """
    addresses = {
        "fleet": settings.fleet_address,
        "allocator": settings.allocator_address,
        "autoscaler": settings.autoscaler_address,
    }
    upstreams: dict[str, Upstream] = {}
    async with AsyncExitStack() as stack:
        for name, address in addresses.items():
            private = settings.ca_file is not None or all(map(_local, split_addresses(address)))
            channel = await stack.enter_async_context(settings.open_channel(address))
            streams = await stack.enter_async_context(Lanes(partial(settings.open_channel, address)))
            upstreams.update(dict.fromkeys(SERVICES[name], Upstream(name, channel, streams, private)))
        yield Forwarder(upstreams), tuple(upstreams)


def _local(address: str) -> bool:
    """Whether an address is surely on this host."""
    return address.startswith("unix:") or parse_listen(address).loopback
