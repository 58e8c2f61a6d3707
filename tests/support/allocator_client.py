"""A whole allocator over a fake fleet, called with the client library, over as many starts as a test wants."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from gpuscale.api.allocator import v1 as api
from gpuscale.client import AsyncClient, UnavailableError, connect_async
from gpuscale.common.runtime.tasks import Clock
from tests.support.allocator import allocator
from tests.support.fake_fleet import FakeFleet, serving
from tests.support.waiting import eventually


@asynccontextmanager
async def allocator_client(
    data_dir: Path, fleet: FakeFleet, *, clock: Clock | None = None, **settings: object
) -> AsyncGenerator[AsyncClient]:
    """Run an allocator and yield a client of it, once it has heard from the fleet."""
    async with (
        serving(fleet) as fleet_address,
        allocator(data_dir, fleet_address, clock=clock, **settings) as address,
        connect_async(address) as client,
    ):

        async def ready() -> bool:
            await client.capacity.RankNodes(api.RankNodesRequest())
            return True

        await eventually(ready, retry_on=(UnavailableError,))
        yield client
