"""Series of GPUs that say who holds them, as the allocator says at each scrape."""

from functools import partial
from typing import Any

import httpx
import pytest

from gpuscale.api.allocator import v1 as api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.errors import FailedPreconditionError, UnavailableError
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.rpc.server import Registration
from gpuscale.monitor.agent.sources import simulated_uuid
from gpuscale.monitor.exposition.snapshots import KEPT_SECONDS, HolderLabels
from tests.support.clock import ManualClock
from tests.support.monitor import running_agent, running_fleet, serve
from tests.support.ports import free_port
from tests.support.promtool import samples

FIRST, SECOND = (simulated_uuid("alpha", index) for index in range(2))


class Holding(api.AllocatorServiceServicer):
    """An allocator in which two share a GPU, one of them with a job; each has a page of its own."""

    def __init__(self) -> None:
        self.filters = list[str]()
        self.away = False

    async def ListReservations(
        self, request: api.ListReservationsRequest, context: Any
    ) -> api.ListReservationsResponse:
        self.filters += [] if request.page_token else [request.filter]
        if self.away:
            raise UnavailableError("the allocator is away", reason="AWAY")
        part = [api.ReservedGpu(uuid=FIRST, milli=500)]
        job = api.Reservation(name="reservations/r2", holder="ben", tenant="vision", gpus=part, job=api.Job())
        one = api.Reservation(name="reservations/r1", holder="ann", tenant="vision", gpus=part)
        page, token = ([one], "") if request.page_token else ([job], "second")
        return api.ListReservationsResponse(reservations=page, next_page_token=token)


def registered(allocator: Holding) -> Registration:
    add = partial(api.add_AllocatorServiceServicer_to_server, allocator)
    return Registration("gpuscale.api.allocator.v1.AllocatorService", add)


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("program", ["agent", "fleet"])
async def test_each_series_of_a_gpu_says_who_holds_it_where_that_is_set(program: str, labelled: bool) -> None:
    allocator, listen = Holding(), f"127.0.0.1:{free_port()}"
    shown = {"metrics_listen": listen, "metrics_holders": labelled}
    own: dict[str, dict[str, Any]] = {"agent": {}, "fleet": {}} | {program: shown}
    async with (
        serve(registered(allocator)) as address,
        open_channel(address) as channel,
        running_fleet(allocator=channel, **own["fleet"]) as fleet,
        running_agent(fleet.address, allocator=channel, **own["agent"]),
        httpx.AsyncClient() as client,
    ):
        await fleet.until("alpha", monitor_api.NodeState.NODE_STATE_ONLINE)
        text = (await client.get(f"http://{listen}/metrics", timeout=30)).text
    found = [one.labels for one in samples(text) if "uuid" in one.labels or "UUID" in one.labels]
    of_first = [one for one in found if FIRST in one.values()]
    wanted = ("ann,ben", "vision", "r2") if labelled else (None, None, None)
    assert {tuple(one.get(name) for name in ("holder", "tenant", "hpc_job")) for one in of_first} == {wanted}
    assert not [one for one in found if SECOND in one.values() and "holder" in one]
    of_node = 'gpus.node:"alpha"' if program == "agent" else ""
    assert allocator.filters == ([of_node] if labelled else [])


async def test_labels_without_an_allocator_are_refused() -> None:
    with pytest.raises(FailedPreconditionError, match="metrics_holders needs allocator_address"):
        async with running_fleet(metrics_holders=True):
            pass


async def test_an_allocator_that_is_away_is_believed_for_a_minute() -> None:
    """Else every series would end and begin with it."""
    allocator, clock = Holding(), ManualClock()
    async with serve(registered(allocator)) as address, open_channel(address) as channel:
        holders = HolderLabels(channel, clock, "alpha")
        known = await holders.ask()
        assert known[FIRST]["holder"] == "ann,ben"
        allocator.away = True
        clock.advance(KEPT_SECONDS - 1)
        assert await holders.ask() == known
        clock.advance(2)
        assert await holders.ask() == {}
