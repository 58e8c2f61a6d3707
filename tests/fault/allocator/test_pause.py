"""A pause that is nearly as long as the leases."""

import asyncio
from pathlib import Path

from gpuscale.common.errors import DeadlineExceededError, UnavailableError
from tests.support.allocator import Reservation
from tests.support.allocator_process import site
from tests.support.waiting import eventually

TTL = 8.0


async def test_a_pause_loses_no_lease_that_is_renewed_each_second(tmp_path: Path) -> None:
    """After a stall renewals that wait in the socket go before the sweep (etcd#15247, #12528).

    At the end of this one every lease has run out already.
    """
    async with site(tmp_path / "data", gpus=8) as place:
        life = await place.start()
        granted = [await place.client.reserve(ttl=TTL) for _ in range(8)]
        renewals = dict.fromkeys((one.name for one in granted), 0)
        stop = asyncio.Event()

        async def renew(one: Reservation) -> None:
            while not stop.is_set():
                try:
                    await place.client.renew(one)
                    renewals[one.name] += 1
                except (UnavailableError, DeadlineExceededError):
                    continue  # it waited for longer than a call may take: at once again
                await asyncio.sleep(1)

        async with asyncio.TaskGroup() as group:
            for one in granted:
                group.create_task(renew(one))
            await eventually(lambda: _all_above(renewals, 1))  # the sweeper is at work by then
            await life.pause(TTL + 0.5)
            seen = dict(renewals)
            await eventually(lambda: _all_above(renewals, max(seen.values())))
            stop.set()
        assert {one.name for one in await place.client.live()} == set(renewals)


async def _all_above(renewals: dict[str, int], count: int) -> bool:
    return min(renewals.values()) > count
