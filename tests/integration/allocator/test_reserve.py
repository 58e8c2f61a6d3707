"""Reserve over real gRPC, with a real store and a fake fleet: what is granted of what nodes report, and to many at once."""

import asyncio
from pathlib import Path

import pytest

from gpuscale.common.errors import ResourceExhaustedError
from tests.support.allocator import Reservation, running
from tests.support.fake_fleet import FakeFleet, GpuState, gpu_message, node_message


async def test_gpus_that_do_not_answer_or_are_stale_are_not_granted(tmp_path: Path) -> None:
    fleet = FakeFleet(
        node_message(
            "n0",
            gpu_message("hung", 0, state=GpuState.GPU_STATE_HUNG),
            gpu_message("lost", 1, state=GpuState.GPU_STATE_LOST),
            gpu_message("unsaid", 2, state=GpuState.GPU_STATE_UNSPECIFIED),
            gpu_message("stale", 3, state=GpuState.GPU_STATE_STALE),
            gpu_message("old", 4, age=31.0),
            gpu_message("silent", 5, free=None),
            gpu_message("degraded", 6, state=GpuState.GPU_STATE_DEGRADED),
            gpu_message("fine", 7),
            period=10.0,
        )
    )
    async with running(tmp_path, fleet) as client:
        assert {gpu.uuid for gpu in (await client.reserve(2, ttl=20)).gpus} == {"degraded", "fine"}
        with pytest.raises(ResourceExhaustedError) as caught:
            await client.reserve()
        assert caught.value.retry_after is not None
        assert caught.value.retry_after <= 20, "the lease has run out then"
        counts = {
            key: caught.value.metadata.get(key) for key in ("gpu_not_ok", "stale", "memory_unknown", "held")
        }
        assert counts == {"gpu_not_ok": "3", "stale": "2", "memory_unknown": "1", "held": "2"}
        assert "HUNG, LOST, UNSPECIFIED" in caught.value.message


async def test_200_callers_of_64_gpus_are_64_grants_and_136_clear_refusals(tmp_path: Path) -> None:
    fleet = FakeFleet(*(node_message(f"n{index}", count=8) for index in range(8)))
    async with running(tmp_path, fleet) as client:
        client.timeout = 60.0
        answers = await asyncio.gather(*(client.reserve() for _ in range(200)), return_exceptions=True)
        granted = [one for one in answers if isinstance(one, Reservation)]
        refused = [one for one in answers if isinstance(one, ResourceExhaustedError)]
        assert (len(granted), len(refused)) == (64, 136)
        assert len({gpu.uuid for one in granted for gpu in one.gpus}) == 64
        assert len({one.name for one in granted}) == len({one.fence for one in granted}) == 64
        for error in refused:
            assert error.reason == "NO_CAPACITY"
            assert error.retry_after is not None
            assert error.metadata["held"] == "64"
        assert {one.name for one in await client.live()} == {one.name for one in granted}
