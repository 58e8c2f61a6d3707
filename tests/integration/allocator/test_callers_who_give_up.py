"""A change whose caller gives up while it is written is made wholly: memory says what the disk says after a restart."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from uuid import UUID

import pytest

from gpuscale.api.allocator import v1 as api
from gpuscale.client import AsyncClient
from gpuscale.common.runtime import failpoints
from gpuscale.common.wire import to_duration
from tests.support.allocator_client import allocator_client
from tests.support.clock import ManualClock
from tests.support.fake_fleet import FakeFleet, node_message

N0, N1, N2 = "nodes/n0", "nodes/n1", "nodes/n2"
HELD, OTHER = (str(UUID(int=number)) for number in (1, 2))
TIMEOUT = 30.0

Change = Callable[[AsyncClient, api.Reservation], Awaitable[object]]
CHANGES: dict[str, Change] = {
    "reserve": lambda client, _: client.allocator.Reserve(_request(OTHER)),
    "release": lambda client, held: client.allocator.ReleaseReservation(
        api.ReleaseReservationRequest(name=held.name, fence=held.fence)
    ),
    "drain": lambda client, _: client.nodes.DrainNode(api.DrainNodeRequest(name=N0, grace=to_duration(100))),
    "uncordon": lambda client, _: client.nodes.UncordonNode(api.UncordonNodeRequest(name=N1)),
    "set quota": lambda client, _: client.quotas.SetQuota(
        api.SetQuotaRequest(quota=api.Quota(tenant="bob", gpu_milli_limit=500))
    ),
    "delete quota": lambda client, _: client.quotas.DeleteQuota(api.DeleteQuotaRequest(tenant="ann")),
}


def _request(request_id: str) -> api.ReserveRequest:
    return api.ReserveRequest(
        request_id=request_id, holder="me", ttl=to_duration(300), ask=api.Ask(gpu_count=1, nodes=[N0])
    )


async def seen(client: AsyncClient) -> list[str]:
    """All that these changes change."""
    found = (
        await client.allocator.ListReservations(api.ListReservationsRequest(show_ended=True)),
        await client.nodes.ListCordons(api.ListCordonsRequest()),
        await client.quotas.ListQuotas(api.ListQuotasRequest()),
    )
    return [str(one) for one in found]


@pytest.mark.parametrize("name", CHANGES)
async def test_a_change_that_nobody_waits_for_is_made_wholly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    clock, fleet = ManualClock(), FakeFleet(*(node_message(f"n{index}", count=2) for index in range(3)))
    writing, go = threading.Event(), threading.Event()

    def slow(point: str) -> None:
        if point == "allocator.store.before_commit":
            writing.set()
            go.wait(TIMEOUT)

    async with allocator_client(tmp_path, fleet, clock=clock) as client:
        held = (await client.allocator.Reserve(_request(HELD))).reservation
        await client.quotas.SetQuota(api.SetQuotaRequest(quota=api.Quota(tenant="ann", weight=3)))
        await client.nodes.DrainNode(api.DrainNodeRequest(name=N1, grace=to_duration(100)))
        with monkeypatch.context() as patch:
            patch.setattr(failpoints, "hit", slow)
            call = asyncio.ensure_future(CHANGES[name](client, held))
            assert await asyncio.to_thread(writing.wait, TIMEOUT)
            call.cancel()
            await asyncio.wait([call])
            for _ in range(
                3
            ):  # sent after it: once they are answered, the allocator knows that the caller is gone
                await seen(client)
            go.set()
        barrier = api.SetQuotaRequest(quota=api.Quota(tenant="last"))  # written after all that is under way
        await client.quotas.SetQuota(barrier)
        await client.nodes.CordonNode(api.CordonNodeRequest(name=N2))
        kept = await seen(client)
    async with allocator_client(tmp_path, fleet, clock=clock) as client:
        assert await seen(client) == kept
