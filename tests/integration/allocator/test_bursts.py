"""Bursts: as many callers at once as come, each gets GPUs of its own or a clear no."""

import asyncio
from collections import Counter
from pathlib import Path

from gpuscale.common.errors import ResourceExhaustedError
from tests.support.allocator import Client, Reservation, running
from tests.support.fake_fleet import FakeFleet, node_message


async def attempts(client: Client, count: int, **ask: object) -> tuple[list[Reservation], list[Exception]]:
    """So many reservations at once: those that were granted, and what the others were told."""

    async def attempt() -> Reservation | ResourceExhaustedError:
        try:
            return await client.reserve(**ask)
        except ResourceExhaustedError as error:
            return error

    client.timeout = 60.0
    answers = await asyncio.gather(*(attempt() for _ in range(count)))
    granted = [one for one in answers if isinstance(one, Reservation)]
    return granted, [one for one in answers if not isinstance(one, Reservation)]


async def test_a_thousand_callers_of_64_gpus_are_64_grants_and_936_clear_refusals(tmp_path: Path) -> None:
    fleet = FakeFleet(*(node_message(f"n{index}", count=8) for index in range(8)))
    async with running(tmp_path, fleet, max_concurrent=2000) as client:
        granted, refused = await attempts(client, 1000)
        assert (len(granted), len(refused)) == (64, 936)
        assert len({gpu.uuid for one in granted for gpu in one.gpus}) == 64
        assert len({one.name for one in granted}) == len({one.fence for one in granted}) == 64
        for error in refused:
            assert isinstance(error, ResourceExhaustedError)
            assert error.reason == "NO_CAPACITY"
            assert error.retry_after is not None
            assert error.metadata["held"] == "64"
        assert {one.name for one in await client.live()} == {one.name for one in granted}


async def test_sixteen_halves_on_eight_gpus_are_two_each(tmp_path: Path) -> None:
    """kai-scheduler #2153 put three and four of them on one card."""
    async with running(tmp_path, FakeFleet(node_message("n0", count=8))) as client:
        granted, refused = await attempts(client, 17, gpu_milli=500, memory=0)
        assert (len(granted), len(refused)) == (16, 1)
        per_gpu = Counter(gpu.uuid for one in granted for gpu in one.gpus)
        assert sorted(per_gpu.values()) == [2] * 8
