"""A history check: eight clients, eight GPUs, an allocator that is killed and paused; no promise may be broken."""

import asyncio
from itertools import cycle
from pathlib import Path
from random import Random

from gpuscale.common.errors import ResourceExhaustedError
from tests.support.allocator_site import Site, site
from tests.support.reservation_traffic import TTL, Traffic
from tests.support.waiting import eventually

SEED = 7
CLIENTS = 8
SECONDS = 8.0
"""How long it is tormented; the life that is running then lives out."""
POINTS = (
    "allocator.reserve.before_commit",
    "allocator.store.before_commit",
    "allocator.store.after_commit",
    "allocator.end.before_commit",
    "allocator.reserve.before_reply",
)
FREE_WITHIN = 6.0
"""Seconds after the last lease could run out: the start delay, a round, and slack for a slow machine."""


async def test_promises_hold_through_kills_and_pauses(tmp_path: Path) -> None:
    async with site(tmp_path) as place:
        traffic = Traffic(place.client, SEED)
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(traffic.holder())
            group.create_task(traffic.lister())
            await torment(place, Random(SEED))
            traffic.stop()
        history = traffic.history
        assert history.violations() == []
        assert len(history.grants) > 50, "too little happened to prove anything"
        assert len(history.sightings) > 20
        assert len(history.repetitions) > 5
        everything = await eventually(
            lambda: place.client.reserve(8), timeout=TTL + FREE_WITHIN, retry_on=(ResourceExhaustedError,)
        )
        assert len(everything.gpus) == 8


async def torment(place: Site, random: Random) -> None:
    """One life after the other, each ended by a failpoint or at random, some paused before; the last one lives on."""
    end = asyncio.get_running_loop().time() + SECONDS
    points = cycle(random.sample(POINTS, len(POINTS)))
    successor = await place.prepare()
    while asyncio.get_running_loop().time() < end:
        dying, successor = successor, await place.prepare(f"{next(points)}=kill")
        await place.go(dying)
        await asyncio.sleep(random.uniform(0.4, 1.2))
        if random.random() < 0.4:
            await dying.pause(0.7)
            await asyncio.sleep(0.3)
        await dying.kill()
        dying, successor = successor, await place.prepare()
        await place.go(dying)
        await dying.ended()
    await place.go(successor)
    await asyncio.sleep(1.0)
