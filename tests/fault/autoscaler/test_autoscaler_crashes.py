"""A second autoscaler on one state is turned away, and the first ends when it is asked to.

Deaths (P16, kill -9) at each step of a start and of an end are those of test_killed_while_moving.py, at any moment, of the same
parts on virtual time, those of tests/property/autoscaler/test_scaling_world.py.
"""

from pathlib import Path

from tests.support.autoscaler_app import endpoint
from tests.support.fake_adapter import FakeAdapter
from tests.support.fake_allocator import FakeAllocator, serving
from tests.support.program import AutoscalerProcess
from tests.support.waiting import eventually


async def test_no_second_one_starts_on_its_state_and_it_ends_when_asked_to(tmp_path: Path) -> None:
    adapter = FakeAdapter()
    async with serving(FakeAllocator({})) as address, AutoscalerProcess(tmp_path, address) as process:
        await process.start()
        async with adapter.connected(process.address), process.called() as autoscaler:
            async with AutoscalerProcess(tmp_path, "127.0.0.1:1") as second:
                await second.start()
                assert await second.ended() == 1
            await autoscaler.create(endpoint(low=1, high=1))
            await eventually(lambda: adapter.alive)
            process.terminate()
            assert await process.ended() == 0
    assert adapter.alive, "the replicas are its adapter's"
