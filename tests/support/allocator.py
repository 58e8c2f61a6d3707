"""A whole allocator in this process: real server, real store, a fake fleet."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from gpuscale.allocator.app import open_allocator
from gpuscale.allocator.settings import AllocatorSettings
from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.client import AsyncClient, connect_async
from gpuscale.common import errors
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.rpc.server import Server, ServerOptions
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.runtime.tasks import Clock, SystemClock
from gpuscale.common.security.auth import Authenticator
from gpuscale.common.store.leadership import Candidate
from gpuscale.common.store.term import Term
from gpuscale.common.wire import to_duration
from tests.support.allocator_values import reserve_request
from tests.support.fake_fleet import FakeFleet, serving
from tests.support.tokens import token, write_tokens
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from gpuscale.api.allocator.v1.allocator_service_pb2_grpc import AllocatorServiceAsyncStub

MIB = 1024 * 1024
Reservation = allocator_api.Reservation


@dataclass
class Client:
    """Calls an allocator in the words of a test; failures are errors of the tree."""

    stub: "AllocatorServiceAsyncStub"
    timeout: float = 10.0
    channel: grpc.aio.Channel | None = None

    async def reserve(self, count: int = 1, **fields: Any) -> Reservation:
        request = reserve_request(count, **fields)
        with rpc_errors():
            return (await self.stub.Reserve(request, timeout=self.timeout)).reservation

    async def renew(
        self, one: Reservation, *, fence: int | None = None, ttl: float | None = None
    ) -> Reservation:
        """Renew, with the fence of the grant unless another is given."""
        request = allocator_api.RenewReservationRequest(
            name=one.name,
            fence=one.fence if fence is None else fence,
            ttl=None if ttl is None else to_duration(ttl),
        )
        with rpc_errors():
            return (await self.stub.RenewReservation(request, timeout=self.timeout)).reservation

    async def release(self, one: Reservation, *, fence: int | None = None) -> Reservation:
        """Release, with the fence of the grant unless another is given."""
        request = allocator_api.ReleaseReservationRequest(
            name=one.name, fence=one.fence if fence is None else fence
        )
        with rpc_errors():
            return (await self.stub.ReleaseReservation(request, timeout=self.timeout)).reservation

    async def get(self, name: str) -> Reservation:
        request = allocator_api.GetReservationRequest(name=name)
        with rpc_errors():
            return (await self.stub.GetReservation(request, timeout=self.timeout)).reservation

    async def ended(self, one: Reservation) -> Reservation | None:
        found = await self.get(one.name)
        return None if found.state == Reservation.STATE_ACTIVE else found

    async def page(self, **fields: object) -> allocator_api.ListReservationsResponse:
        request = allocator_api.ListReservationsRequest(**fields)
        with rpc_errors():
            return await self.stub.ListReservations(request, timeout=self.timeout)

    async def live(self) -> list[Reservation]:
        return await self.listed()

    async def listed(self, **fields: object) -> list[Reservation]:
        """Those of all pages."""
        found, token = [], ""
        while True:
            page = await self.page(page_token=token, **fields)
            found += page.reservations
            token = page.next_page_token
            if not token:
                return found

    async def ready(self, timeout: float = 30.0) -> None:
        """Wait until the allocator serves and has heard from the fleet."""
        late = errors.UnavailableError, errors.DeadlineExceededError, TimeoutError
        await eventually(self._answers, timeout=timeout, retry_on=late)

    async def heard(self, node: str, count: int = 1) -> None:
        """Wait until so many GPUs of a node can be reserved: it is known before its first report."""
        await self.ready()
        first = partial(self.reserve, count, nodes=[f"nodes/{node}"])
        await self.release(
            await eventually(first, retry_on=(errors.ResourceExhaustedError, errors.FailedPreconditionError))
        )

    async def _answers(self) -> bool:
        try:
            await self.reserve(4096)
        except errors.GpuscaleError as error:
            if isinstance(error, (errors.UnavailableError, errors.DeadlineExceededError)):
                raise
        return True


@asynccontextmanager
async def calling(address: str, *, timeout: float = 10.0) -> AsyncGenerator[Client]:
    async with open_channel(address) as channel:
        yield Client(allocator_api.AllocatorServiceStub(channel), timeout, channel)


@asynccontextmanager
async def allocator(
    data_dir: Path,
    fleet_address: str,
    *,
    clock: Clock | None = None,
    authenticator: Authenticator | None = None,
    **settings: object,
) -> AsyncGenerator[str]:
    chosen = AllocatorSettings.model_validate(
        {"data_dir": data_dir, "fleet_address": fleet_address, "listen": "127.0.0.1:0"} | settings
    )
    server = Server(ServerOptions(listen=chosen.listen), authenticator or Authenticator())
    address = server.bind()
    async with (
        open_channel(fleet_address) as fleet,
        _term(chosen, address) as term,
        open_allocator(chosen, fleet=fleet, clock=clock or SystemClock(), term=term) as registrations,
    ):
        server.add(*registrations)
        async with server:
            yield address


@asynccontextmanager
async def _term(settings: AllocatorSettings, address: str) -> AsyncGenerator[Term | None]:
    """The lead, where the settings name a database; nobody else stands for it."""
    if settings.database is None:
        yield None
        return
    async with Candidate(settings.database, settings.section, address).term() as term:
        yield term


@asynccontextmanager
async def running(
    data_dir: Path, fleet: FakeFleet, *, clock: Clock | None = None, ready: bool = True, **options: object
) -> AsyncGenerator[Client]:
    """Run an allocator over a fake fleet and yield a client of it."""
    async with (
        serving(fleet) as fleet_address,
        allocator(data_dir, fleet_address, clock=clock, **options) as address,
        calling(address) as client,
    ):
        if ready:
            await client.ready()
        yield client


CALLERS = {
    "ann": "operator",
    "bob": "operator",
    "ml": "operator",
    "scaler": "operator",
    "ada": "admin",
    "eve": "viewer",
}
LIMITS = {"ml": 'tenants = ["ml", "vision"]\nmax_priority = 10\n', "scaler": 'tenants = ["*"]\n'}


@asynccontextmanager
async def callers(
    data_dir: Path, fleet: FakeFleet, *names: str, clock: Clock | None = None, **settings: object
) -> AsyncGenerator[tuple[AsyncClient, ...]]:
    """Clients of an allocator by the tokens of these callers; unless told, of `ann`, `bob` and `ada`."""
    file = data_dir / "tokens.toml"
    tables = [
        write_tokens(file, **{name: role}).read_text() + LIMITS.get(name, "")
        for name, role in CALLERS.items()
    ]
    file.write_text("".join(tables))
    options = {"clock": clock, "authenticator": Authenticator(tokens_file=file), **settings}
    async with AsyncExitStack() as stack:
        fleet_address = await stack.enter_async_context(serving(fleet))
        address = await stack.enter_async_context(allocator(data_dir, fleet_address, **options))
        clients = [
            await stack.enter_async_context(connect_async(address, token=token(name)))
            for name in names or ("ann", "bob", "ada")
        ]
        await _heard(clients[0])
        yield tuple(clients)


async def _heard(client: AsyncClient) -> None:
    """Wait until the allocator has heard from the fleet."""
    request = allocator_api.RankNodesRequest()
    await eventually(lambda: client.capacity.RankNodes(request), retry_on=(errors.UnavailableError,))


@asynccontextmanager
async def allocator_client(
    data_dir: Path, fleet: FakeFleet, *, clock: Clock | None = None, **settings: object
) -> AsyncGenerator[AsyncClient]:
    """Run an allocator and yield a client of the library, once it has heard from the fleet."""
    async with (
        serving(fleet) as fleet_address,
        allocator(data_dir, fleet_address, clock=clock, **settings) as address,
        connect_async(address) as client,
    ):
        await _heard(client)
        yield client


async def reread(client: AsyncClient, name: str) -> Reservation:
    """A reservation as it is now."""
    return (await client.allocator.GetReservation(allocator_api.GetReservationRequest(name=name))).reservation


async def release(client: AsyncClient, one: Reservation) -> None:
    """Release a reservation that was made by its message."""
    request = allocator_api.ReleaseReservationRequest(name=one.name, fence=one.fence)
    await client.allocator.ReleaseReservation(request)
