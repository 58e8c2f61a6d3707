"""Events of GPUs: the thread that waits for them, and faults that the fleet is told of."""

import asyncio
import gc

import pytest

from gpuscale.api.monitor import v1 as api
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.runtime.tasks import SystemClock
from gpuscale.monitor.agent.events import MOST_FAULTS, FaultLog, Listener
from gpuscale.monitor.agent.sources import GpuSourceError
from gpuscale.monitor.app import agent as agent_app
from gpuscale.monitor.model.readings import DriverEvent, GpuReading, GpuState, GpuView
from tests.support.monitor import FakeGpus, RunningFleet, running_agent
from tests.support.monitor_values import identity
from tests.support.waiting import eventually

ONLINE = api.NodeState.NODE_STATE_ONLINE


async def test_a_fault_is_a_health_event_before_the_next_snapshot(
    fleet: RunningFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the driver to who watches health. Snapshots come every 30 s: only what is pushed arrives in time."""
    driver = FakeGpus(has_events=True)
    monkeypatch.setattr(agent_app, "make_source", lambda *_, **__: driver)
    async with running_agent(fleet.address, period_seconds=30.0), open_channel(fleet.address) as channel:
        node = await fleet.until("alpha", ONLINE)
        health = api.HealthServiceStub(channel)
        watch = health.WatchHealth(api.WatchHealthRequest())
        async with asyncio.timeout(30):
            await watch.read()
            uuid = node.snapshot.gpus[0].uuid
            driver.happened.put(DriverEvent(uuid, 48))
            told = await watch.read()
        assert isinstance(told, api.WatchHealthResponse)
        [event] = told.health_events
        assert (event.xid, event.uuid, event.node, event.fatal) == (48, uuid, "nodes/alpha", True)
        assert "XID 48" in (await fleet.node("alpha")).snapshot.gpus[0].quarantine
        watch.cancel()


def view(state: GpuState) -> GpuView:
    return GpuView(identity(0), state, GpuReading(), None)


def numbers(faults: FaultLog, last: int = -1) -> list[int]:
    return [fault.seq for fault in faults.message(last, 100.0).faults]


def test_faults_are_told_again_until_the_gpu_was_away() -> None:
    faults = FaultLog()
    uuid = identity(0).uuid
    faults.add(uuid, 79, 90.0)
    faults.saw([view(GpuState.LOST)])
    assert numbers(faults) == [0], "the fleet was not told of it yet"
    faults.told(0)
    faults.saw([view(GpuState.OK)])
    assert numbers(faults) == [0]
    faults.add(uuid, 48, 95.0)
    assert numbers(faults, last=0) == [1]
    faults.saw([view(GpuState.RELEASED)])
    assert numbers(faults) == [1]


def test_few_faults_are_kept_and_their_ages_are_told() -> None:
    faults = FaultLog()
    for number in range(MOST_FAULTS + 10):
        faults.add("GPU-1", 31, float(number))
    assert numbers(faults) == list(range(10, MOST_FAULTS + 10))
    assert faults.message(-1, 100.0).faults[0].age.seconds == 90


class TakenAway(FakeGpus):
    """A source whose process is gone."""

    def wait_event(self, timeout: float) -> DriverEvent | None:
        raise GpuSourceError("the process that reads the driver has ended")


async def listen_twice() -> BaseException | None:
    """Listen to such a source, and once more after that; why the second time ended."""
    listener = Listener(TakenAway(), SystemClock(), [], wait=1.0)
    for _ in range(2):
        listener.start()
        await eventually(lambda: listener.listening is None)
    listener.stop()
    return listener.error


async def test_that_a_source_ended_while_it_was_listened_to_is_no_complaint_of_the_loop() -> None:
    """The agent knows it from the GPUs. The event loop would write "exception was never retrieved" into the log."""
    complaints: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
    assert isinstance(await listen_twice(), GpuSourceError)
    gc.collect()
    assert complaints == []
