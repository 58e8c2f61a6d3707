"""Two allocators on one PostgreSQL, as processes that a test kills and pauses, and a client that follows the leader."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.common.errors import GpuscaleError, UnavailableError
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.rpc.wrapped_channel import FOLLOWS, WrappedChannel, with_header
from gpuscale.common.secrets import SecretUrl
from tests.support.allocator import Client
from tests.support.allocator_process import AllocatorProcess, Launcher, config_file, launching
from tests.support.fake_fleet import FakeFleet, node_message, serving
from tests.support.ports import free_port
from tests.support.postgresql import PostgresServer
from tests.support.waiting import eventually


class Pair:
    """The processes by their places, 0 and 1, with a client of each; `client` follows whoever leads."""

    def __init__(
        self,
        launcher: Launcher,
        args: list[list[str]],
        addresses: list[str],
        clients: list[Client],
        client: Client,
    ) -> None:
        self.addresses = addresses
        self.clients = clients
        self.client = client
        self.lives: list[AllocatorProcess | None] = [None, None]
        self._launcher = launcher
        self._args = args

    def start(self, place: int, failpoints: str = "") -> AllocatorProcess:
        life = self._launcher.prepare(self._args[place], failpoints)
        life.go()
        self.lives[place] = life
        return life

    def at(self, place: int) -> AllocatorProcess:
        life = self.lives[place]
        assert life is not None
        return life

    async def says(self, place: int) -> str:
        """What the process of a place is: "leader", a reason, and with NOT_LEADER the leader it names."""
        try:
            await self.clients[place].live()
        except GpuscaleError as error:
            return f"{error.reason} {error.metadata.get('leader', '')}".strip()
        return "leader"

    async def leads(self, place: int) -> bool:
        return await self.says(place) == "leader"

    async def leader(self) -> int:
        """Wait until one of them leads and the other stands by and knows it; the place of the one."""
        return await eventually(self._settled, timeout=60.0) - 1

    async def _settled(self) -> int:
        for place in (0, 1):
            hint = f"NOT_LEADER {self.addresses[place]}"
            if await self.leads(place) and await self.says(1 - place) == hint:
                return place + 1
        return 0


@asynccontextmanager
async def pair(folder: Path, database: SecretUrl, *, gpus: int = 8) -> AsyncGenerator[Pair]:
    """Two places below a fleet with a node of so many GPUs; nothing runs there yet."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    fleet = FakeFleet(node_message("n0", count=gpus))
    async with AsyncExitStack() as stack:
        fleet_address = await stack.enter_async_context(serving(fleet))
        channels = [
            await stack.enter_async_context(open_channel(address))
            for address in (*addresses, ",".join(addresses))
        ]
        launcher = await stack.enter_async_context(launching(folder / "logs"))
        args = [
            [
                *(
                    "--data-dir",
                    str(folder / str(place)),
                    "--listen",
                    address,
                    "--fleet-address",
                    fleet_address,
                ),
                *("--config", str(config_file(folder / str(place), database))),
            ]
            for place, address in enumerate(addresses)
        ]
        follow = with_header(*FOLLOWS)
        channels[:2] = [WrappedChannel([channel], follow) for channel in channels[:2]]
        clients = [Client(allocator_api.AllocatorServiceStub(channel), 30.0) for channel in channels]
        yield Pair(launcher, args, addresses, clients[:2], clients[2])


async def reached(client: Client, count: int) -> None:
    """Wait until so many GPUs can be reserved: the allocator has heard of the fleet."""
    one = await eventually(lambda: client.reserve(count), timeout=60.0, retry_on=(UnavailableError,))
    await client.release(one)


@asynccontextmanager
async def plain(address: str) -> AsyncGenerator[Client]:
    """A client of gRPC alone."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"ipv4:{address}", options=options) as channel:
        yield Client(allocator_api.AllocatorServiceStub(channel), 30.0)


@asynccontextmanager
async def settled(folder: Path, postgresql: PostgresServer, failpoints: str) -> AsyncGenerator[Pair]:
    """The first leads, the second stands by and forwards."""
    async with pair(folder, postgresql.database(), gpus=8) as both:
        both.start(0, failpoints)
        await eventually(lambda: both.leads(0))
        both.start(1)
        assert await both.leader() == 0
        async with plain(both.addresses[1]) as client:
            await eventually(lambda: forwards(client), retry_on=(UnavailableError,))
        yield both


async def forwards(client: Client) -> bool:
    return await client.live() == []
