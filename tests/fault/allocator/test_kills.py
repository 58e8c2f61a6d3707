"""kill -9 in the moment of the acknowledgement, round after round, and a pause that is nearly as long as the leases.

GPUSCALE_KILL_ROUNDS sets how many rounds there are: 20 for the full count of 800 grants, a few otherwise.
"""

import asyncio
import os
import signal
from itertools import pairwise
from pathlib import Path

from gpuscale.common.errors import DeadlineExceededError, UnavailableError
from tests.support.allocator import Reservation
from tests.support.allocator_process import AllocatorProcess, Site, site
from tests.support.waiting import eventually

ROUNDS = int(os.environ.get("GPUSCALE_KILL_ROUNDS", "4"))
GRANTS = 40
NODES = 8


async def test_every_grant_acknowledged_before_a_kill_is_alive_after_it(tmp_path: Path) -> None:
    """Slurm 22.05 came back with one of forty, and gave the ids out again."""
    granted: list[Reservation] = []
    async with site(tmp_path / "data", gpus=GRANTS * ROUNDS // NODES, nodes=NODES) as place:
        life = await place.start()
        for _ in range(ROUNDS):
            successor = place.prepare()
            granted += await killed_after_grants(place, life)
            await place.go(successor)
            life = successor
            kept = {one.name: one for one in await place.client.live()}
            assert len(kept) == len(granted)
            for one in granted:
                assert (kept[one.name].fence, kept[one.name].gpus) == (one.fence, one.gpus)
        assert len({one.name for one in granted}) == GRANTS * ROUNDS
        assert len({gpu.uuid for one in granted for gpu in one.gpus}) == GRANTS * ROUNDS
        rounds = [granted[start : start + GRANTS] for start in range(0, len(granted), GRANTS)]
        for before, after in pairwise(rounds):
            assert max(one.fence for one in before) < min(one.fence for one in after)


async def killed_after_grants(place: Site, life: AllocatorProcess) -> list[Reservation]:
    """Forty grants at once; in the turn of the event loop in which the last answer is read, the process is killed."""
    granted: list[Reservation] = []

    async def attempt() -> None:
        granted.append(await place.client.reserve())
        if len(granted) == GRANTS:
            os.kill(life.pid, signal.SIGKILL)

    await asyncio.gather(*(attempt() for _ in range(GRANTS)))
    assert (await life.ended())[0] == -signal.SIGKILL
    return granted


async def test_a_pause_loses_no_lease_of_four_seconds_that_is_renewed_each_second(tmp_path: Path) -> None:
    """After a stall renewals that wait in the socket go before the sweep (etcd#15247, #12528).

    The promise is for a pause of three seconds; at the end of this one every lease has run out already.
    """
    async with site(tmp_path / "data", gpus=8) as place:
        life = await place.start()
        granted = [await place.client.reserve(ttl=4) for _ in range(8)]
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
            await life.pause(4.5)
            seen = dict(renewals)
            await eventually(lambda: _all_above(renewals, max(seen.values())), timeout=30)
            stop.set()
        assert {one.name for one in await place.client.live()} == set(renewals)


async def _all_above(renewals: dict[str, int], count: int) -> bool:
    return min(renewals.values()) > count
