"""A driver that does not answer at all is interrupted where that can be done, and opened again."""

from gpuscale.monitor.agent.sources import GpuSourceError
from gpuscale.monitor.model.readings import GpuState
from tests.support.gpus_rig import FIRST, SECOND, rig
from tests.support.monitor import FakeGpus
from tests.support.waiting import eventually


async def test_a_driver_that_is_silent_as_a_whole_is_interrupted_and_its_gpus_hang_until_they_are_read() -> (
    None
):
    async with rig(FakeGpus(interruptible=True)) as one:
        await one.refresh()
        for uuid in (FIRST, SECOND):
            one.source.block(uuid)
        await one.refresh(wait=0.1)
        one.clock.ahead = 11.0
        await one.refresh(wait=0.1)
        one.source.gates.clear()
        one.source.block("open")
        await eventually(lambda: one.gpus.collection().hung_threads == 0)
        await one.refresh(wait=0.1)
        assert [view.state for view in one.gpus.views()] == [GpuState.HUNG] * 2, "neither lost nor well"
        assert "no answer for 11 s" in one.view(FIRST).reading.absent[0].detail
        one.source.gates.pop("open").set()
        await one.until(FIRST, GpuState.OK)
        await one.until(SECOND, GpuState.OK)
        assert one.gpus.collection().interruptions == 1


async def test_a_driver_is_not_interrupted_while_one_gpu_answers() -> None:
    async with rig(FakeGpus(interruptible=True)) as one:
        await one.refresh()
        one.source.block(FIRST)
        await one.refresh(wait=0.1)
        one.clock.ahead = 11.0
        for _ in range(3):
            await one.refresh()
        assert one.view(FIRST).state is GpuState.HUNG
        assert one.gpus.collection().interruptions == 0


async def test_an_opening_that_hangs_is_interrupted_and_tried_again_soon() -> None:
    async with rig(FakeGpus(interruptible=True)) as one:
        one.source.block("open")
        for ahead in (0.0, 9.0, 10.5):
            one.clock.ahead = ahead
            await one.refresh(wait=0.1)
        assert one.gpus.collection().interruptions == 1
        await eventually(lambda: one.gpus.problem() == "interrupted")
        one.clock.ahead = 10.5 + 5.5
        await one.until(FIRST, GpuState.OK)


async def test_once_the_driver_refuses_its_gpus_are_lost_and_not_hung() -> None:
    """The silence is over: it says that it is not loaded."""
    async with rig(FakeGpus(interruptible=True)) as one:
        await one.refresh()
        gates = [one.source.block(uuid) for uuid in (FIRST, SECOND)]
        await one.refresh(wait=0.1)
        one.clock.ahead = 11.0
        one.source.problem = GpuSourceError("NVML: Driver Not Loaded")
        await one.refresh(wait=0.1)
        assert all(gate.is_set() for gate in gates)
        await one.until(FIRST, GpuState.LOST)
        assert one.view(SECOND).state is GpuState.LOST
