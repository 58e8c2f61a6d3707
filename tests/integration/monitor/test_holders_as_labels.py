"""Series of GPUs that say who holds them, as the allocator says at each scrape."""

from functools import partial
from typing import Any

import httpx
import pytest

from gpuscale.api.allocator import v1 as api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.errors import UnavailableError
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.rpc.server import Registration
from gpuscale.monitor.agent.sources import simulated_uuid
from gpuscale.monitor.exposition.holders import KEPT_SECONDS, HoldersOfNode
from tests.support.clock import ManualClock
from tests.support.monitor import running_agent, serve
from tests.support.ports import free_port
from tests.support.promtool import samples

FIRST, SECOND = (simulated_uuid("alpha", index) for index in range(2))


class Holding(api.AllocatorServiceServicer):
    """An allocator in which two share a GPU, one of them with a job."""

    def __init__(self) -> None:
        self.filters = list[str]()
        self.away = False

    async def ListReservations(
        self, request: api.ListReservationsRequest, context: Any
    ) -> api.ListReservationsResponse:
        self.filters.append(request.filter)
        if self.away:
            raise UnavailableError("the allocator is away", reason="AWAY")
        part = [api.ReservedGpu(uuid=FIRST, milli=500)]
        job = api.Reservation(name="reservations/r2", holder="ben", tenant="vision", gpus=part, job=api.Job())
        one = api.Reservation(name="reservations/r1", holder="ann", tenant="vision", gpus=part)
        return api.ListReservationsResponse(reservations=[job, one])


def registered(allocator: Holding) -> Registration:
    add = partial(api.add_AllocatorServiceServicer_to_server, allocator)
    return Registration("gpuscale.api.allocator.v1.AllocatorService", add)


@pytest.mark.parametrize("labelled", [True, False])
async def test_each_series_of_a_gpu_says_who_holds_it_where_that_is_set(labelled: bool) -> None:
    allocator, listen = Holding(), f"127.0.0.1:{free_port()}"
    async with (
        serve(registered(allocator)) as address,
        open_channel(address) as channel,
        running_agent(allocator=channel, metrics_listen=listen, metrics_holders=labelled) as agent,
        httpx.AsyncClient() as client,
    ):
        await agent.GetSnapshot(monitor_api.GetSnapshotRequest(), timeout=5)
        text = (await client.get(f"http://{listen}/metrics", timeout=10)).text
    found = [one.labels for one in samples(text) if "uuid" in one.labels or "UUID" in one.labels]
    of_first = [one for one in found if FIRST in one.values()]
    wanted = ("ann,ben", "vision", "r2") if labelled else (None, None, None)
    assert {tuple(one.get(name) for name in ("holder", "tenant", "hpc_job")) for one in of_first} == {wanted}
    assert not [one for one in found if SECOND in one.values() and "holder" in one]
    assert allocator.filters == (['gpus.node:"alpha"'] if labelled else [])


async def test_an_allocator_that_is_away_is_believed_for_a_minute() -> None:
    """Else every series would end and begin with it."""
    allocator, clock = Holding(), ManualClock()
    async with serve(registered(allocator)) as address, open_channel(address) as channel:
        holders = HoldersOfNode(channel, "alpha", clock)
        known = await holders.ask()
        assert known[FIRST]["holder"] == "ann,ben"
        allocator.away = True
        clock.advance(KEPT_SECONDS - 1)
        assert await holders.ask() == known
        clock.advance(2)
        assert await holders.ask() == {}
