"""The one owner of the GPUs: it opens, reads and opens again, and a driver that is silent as a whole is interrupted."""

import asyncio
import re
import threading
from dataclasses import replace

import pytest

from gpuscale.monitor.agent.gpus import Gpus
from gpuscale.monitor.agent.sources import GpuSourceError
from gpuscale.monitor.agent.threads import ThreadDiedError
from gpuscale.monitor.model.readings import (
    DriverEvent,
    GpuEvent,
    GpuReading,
    GpuSample,
    GpuState,
    ReadingStatus,
)
from tests.support.gpus_rig import FIRST, SECOND, Rig, rig
from tests.support.monitor import FakeGpus
from tests.support.monitor_values import identity, sample
from tests.support.waiting import eventually


def hung(gpus: Gpus) -> int:
    """How many threads are stuck in the driver."""
    return sum(device.hung for device in gpus._devices.values())


async def test_the_first_round_opens_the_source_and_reads_every_gpu() -> None:
    async with rig() as one:
        await one.refresh()
        assert [view.state for view in one.gpus.views()] == [GpuState.OK, GpuState.OK]
        assert one.gpus.driver_version == "1.2.3"
        assert one.gpus.problem() == ""
        assert (one.source.opened, one.source.reads) == (1, {FIRST: 1, SECOND: 1})
    assert one.source.closed == 2, "once before it was opened, once at the end"


async def test_a_silent_gpu_delays_one_round_and_no_other() -> None:
    async with rig() as one:
        await one.refresh()
        began = asyncio.get_running_loop().time()
        await one.silent(FIRST)
        assert asyncio.get_running_loop().time() - began >= 0.09
        for _ in range(5):
            assert await one.refresh(wait=30.0) < 20.0, "it is not waited for again"
        assert one.source.reads == {FIRST: 2, SECOND: 7}, "no second call is queued on it"
        assert one.view(SECOND).state is GpuState.OK


async def test_a_silent_gpu_becomes_slow_then_hung_then_answers_again() -> None:
    async with rig() as one:
        await one.refresh()
        [gate] = await one.silent(FIRST)
        one.clock.ahead = 3.0
        assert one.view(FIRST).state is GpuState.SLOW
        assert one.view(FIRST).reading.utilization_percent == 10.0
        one.clock.ahead = 11.0
        assert one.view(FIRST).state is GpuState.HUNG
        assert one.view(FIRST).reading.utilization_percent is None
        assert one.view(SECOND).state is GpuState.OK
        gate.set()
        await one.until(FIRST, GpuState.OK)
        assert one.source.opened == 1


async def test_a_driver_that_does_not_answer_when_it_is_opened_is_said_and_used_when_it_does() -> None:
    source = FakeGpus()
    gate = source.block("open")
    async with rig(source) as one:
        assert await one.refresh(wait=0.1) < 20.0
        assert await one.refresh(wait=0.1) < 20.0
        one.clock.ahead = 12.0
        problem = re.fullmatch("the driver has not answered for (.+) s while starting", one.gpus.problem())
        assert problem is not None
        assert int(problem[1]) >= 12
        assert one.gpus.views() == ()
        gate.set()

        async def opened() -> bool:
            await one.refresh()
            return one.gpus.problem() == ""

        await eventually(opened)
        assert source.opened == 1
        assert len(one.gpus.views()) == 2


async def test_without_a_driver_the_problem_is_said_and_a_driver_that_comes_is_found() -> None:
    source = FakeGpus(problem=GpuSourceError("NVML: Driver Not Loaded", no_driver=True))
    async with rig(source) as one:
        await one.refresh()
        assert one.gpus.problem() == "NVML: Driver Not Loaded"
        for _ in range(100):
            await one.refresh()
        assert source.opened <= 10, "attempts have a backoff"
        source.problem = None
        one.clock.ahead = 60.0
        await one.refresh()
        assert one.gpus.problem() == ""
        assert len(one.gpus.views()) == 2


async def test_a_driver_that_was_reloaded_is_opened_again_at_once_and_its_gpus_are_lost_until_then() -> None:
    async with rig() as one:
        await one.refresh()
        one.clock.ahead = 60.0
        gone = GpuSourceError("NVML: Uninitialized")
        one.source.errors = {FIRST: gone, SECOND: gone}
        await one.refresh()
        view = one.view(FIRST)
        assert view.state is GpuState.LOST
        assert view.reading.absent[0].status is ReadingStatus.LOST
        assert one.gpus.problem() == "NVML: Uninitialized"
        one.source.problem = GpuSourceError("NVML: Driver Not Loaded")
        await one.refresh()
        assert one.source.opened == 2
        assert [view.state for view in one.gpus.views()] == [GpuState.LOST, GpuState.LOST]
        assert (one.gpus.problem(), one.gpus.driver_version) == ("NVML: Driver Not Loaded", "")
        one.source.errors, one.source.problem = {}, None
        one.clock.ahead = 120.0
        await one.refresh()
        assert one.source.opened == 3
        assert one.view(FIRST).state is GpuState.OK
        assert one.gpus.problem() == ""


async def test_one_lost_gpu_is_not_reason_enough_to_take_the_others_away() -> None:
    async with rig() as one:
        await one.refresh()
        one.source.samples[FIRST] = sample(state=GpuState.LOST)
        for ahead in (60.0, 120.0, 180.0):
            one.clock.ahead = ahead
            await one.refresh()
        assert one.source.opened == 1
        one.clock.ahead = 400.0
        await one.refresh()
        assert one.source.opened == 2, "only now and then"


async def test_a_gpu_of_which_nothing_can_be_read_counts_as_lost_with_its_handle() -> None:
    """Old handles after a reload fail with whatever error: recovery does not depend on which."""
    async with rig(FakeGpus(gpus=[identity(0)])) as one:
        await one.refresh()
        one.clock.ahead = 60.0
        broken = GpuReading.nothing(ReadingStatus.ERROR, "Unknown Error")
        one.source.samples[FIRST] = sample(state=GpuState.DEGRADED)
        await one.refresh()
        await one.refresh()
        assert one.source.opened == 1
        one.source.samples[FIRST] = type(sample())(GpuState.DEGRADED, broken)
        await one.refresh()
        del one.source.samples[FIRST]
        await one.refresh()
        assert one.source.opened == 2
        assert one.view(FIRST).state is GpuState.OK


async def test_the_source_is_not_opened_again_while_a_call_is_out() -> None:
    async with rig() as one:
        await one.refresh()
        one.clock.ahead = 60.0
        gate = one.source.block(FIRST)
        one.source.errors[SECOND] = GpuSourceError("NVML: Uninitialized")
        await one.refresh(wait=0.1)
        one.source.errors[FIRST] = GpuSourceError("NVML: Uninitialized")
        await one.refresh(wait=0.1)
        assert one.source.opened == 1
        gate.set()
        one.source.gates.clear()
        await eventually(lambda: one.view(FIRST).state is GpuState.LOST)
        one.source.errors.clear()
        await one.until(FIRST, GpuState.OK)
        assert one.source.opened == 2


async def test_a_gpu_that_the_driver_no_longer_lists_stays_visible_as_lost_and_may_come_back() -> None:
    async with rig() as one:
        await one.refresh()
        one.clock.ahead = 60.0
        both, one.source.gpus = one.source.gpus, one.source.gpus[:1]
        one.source.errors = {FIRST: GpuSourceError("reloaded"), SECOND: GpuSourceError("reloaded")}
        await one.refresh()
        one.source.errors = {}
        await one.refresh()
        assert one.view(FIRST).state is GpuState.OK
        assert one.view(SECOND).state is GpuState.LOST
        assert one.gpus.problem() == ""
        one.source.gpus = both
        one.source.errors = {FIRST: GpuSourceError("reloaded")}
        one.clock.ahead = 120.0
        await one.refresh()
        one.source.errors = {}
        one.clock.ahead = 180.0
        await one.refresh()
        assert one.view(SECOND).state is GpuState.OK


async def test_a_bug_in_a_source_ends_the_reading_and_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    async with rig() as one:
        one.source.errors[FIRST] = ZeroDivisionError("a bug")
        with pytest.raises(ThreadDiedError):
            await one.refresh()
        await eventually(lambda: [one.exc_type for one in seen] == [ZeroDivisionError])


async def test_closing_does_not_wait_for_a_call_that_is_out() -> None:
    one = Rig(FakeGpus())
    await one.refresh()
    gate = one.source.block(FIRST)
    await one.refresh(wait=0.0)
    async with asyncio.timeout(20.0):
        await one.gpus.close()
    assert one.source.closed == 1, "the driver is not shut down under a call"
    gate.set()


async def test_a_gpu_that_answers_too_late_is_asked_a_question_before_it_is_read_again() -> None:
    async with rig() as one:
        await one.refresh()
        [gate] = await one.silent(FIRST)
        one.clock.ahead = 30.0
        assert hung(one.gpus) == 1
        gate.set()
        one.source.gates.clear()
        question = one.source.block(f"probe {FIRST}")
        await eventually(lambda: hung(one.gpus) == 0)
        assert one.view(FIRST).state is GpuState.HUNG, "an answer that took 30 s proves nothing"
        one.clock.ahead = 60.0
        reads = one.source.reads[FIRST]
        await one.refresh(wait=0.1)
        assert (one.source.probes, one.source.reads[FIRST]) == (1, reads)
        question.set()
        one.source.gates.clear()
        await one.until(FIRST, GpuState.OK)
        assert one.source.probes == 1


async def test_events_reach_every_observer_in_order() -> None:
    source = FakeGpus(has_events=True)
    first, second = list[GpuEvent](), asyncio.Queue[GpuEvent]()
    async with rig(source) as one:
        one.gpus.observers += (first.append, second.put_nowait)
        await one.refresh()
        for xid in range(3):
            source.happened.put(DriverEvent(FIRST, xid))
        async with asyncio.timeout(30.0):
            assert [(await second.get()).xid for _ in range(3)] == [0, 1, 2]
        assert [event.xid for event in first] == [0, 1, 2]


async def test_parts_that_came_or_went_are_looked_for_at_once_without_a_gap() -> None:
    async with rig(FakeGpus(has_events=True)) as one:
        await one.refresh()
        one.clock.ahead = 60.0
        part = replace(identity(0), uuid="MIG-1", parent_uuid=FIRST, mig_profile="1g.10gb")
        one.source.gpus = [replace(identity(0), divided=True), part, identity(1)]
        one.source.outdated = True
        await one.refresh()
        assert [view.identity.uuid for view in one.gpus.views()] == [FIRST, "MIG-1", SECOND]
        assert [view.state for view in one.gpus.views()] == [GpuState.DIVIDED, GpuState.OK, GpuState.OK]
        assert not one.gpus.knows(FIRST), "work is placed on its parts"
        assert one.gpus.knows("MIG-1")
        one.clock.ahead = 120.0
        one.source.gpus = [identity(0), identity(1)]
        one.source.outdated = True
        await one.refresh()
        assert [view.identity.uuid for view in one.gpus.views()] == [FIRST, SECOND], "taken away on purpose"


async def test_wires_are_known_once_both_ends_have_been_read() -> None:
    async with rig() as one:
        one.source.samples = {FIRST: linked(None, None), SECOND: linked(None)}
        await one.refresh()
        assert [view.identity.nvlinks for view in one.gpus.views()] == [((SECOND, 1),), ((FIRST, 1),)]


def linked(*ends: str | None) -> GpuSample:
    return sample()._replace(link_ends=ends)


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
        await eventually(lambda: hung(one.gpus) == 0)
        await one.refresh(wait=0.1)
        assert [view.state for view in one.gpus.views()] == [GpuState.HUNG] * 2, "neither lost nor well"
        told = one.view(FIRST).reading.absent[0].detail
        assert int(told.removeprefix("no answer for ").removesuffix(" s")) >= 11, told
        one.source.gates.pop("open").set()
        await one.until(FIRST, GpuState.OK)
        await one.until(SECOND, GpuState.OK)
        assert one.gpus.collection.interruptions == 1


async def test_a_driver_is_not_interrupted_while_one_gpu_answers() -> None:
    async with rig(FakeGpus(interruptible=True)) as one:
        await one.refresh()
        await one.silent(FIRST)
        one.clock.ahead = 11.0
        for _ in range(3):
            await one.refresh()
        assert one.view(FIRST).state is GpuState.HUNG
        assert one.gpus.collection.interruptions == 0


async def test_an_opening_that_hangs_is_interrupted_and_tried_again_soon() -> None:
    async with rig(FakeGpus(interruptible=True)) as one:
        one.source.block("open")
        assert one.gpus.problem() == "the GPUs have not been looked for yet", "it is no host without GPUs"
        for ahead in (0.0, 9.0, 10.5):
            one.clock.ahead = ahead
            await one.refresh(wait=0.1)
            assert one.gpus.problem()
        assert one.gpus.collection.interruptions == 1
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
