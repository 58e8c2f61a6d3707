"""The reading loop: one reading at a time, shared by whoever needs one."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest

from gpuscale.common.rpc.meter import ProgramMeter
from gpuscale.common.runtime.tasks import TaskScope
from gpuscale.monitor.agent.collector import Broadcast, Sampler
from gpuscale.monitor.app.agent import LAG_PERIOD
from gpuscale.monitor.model.readings import Snapshot
from tests.support.clock import LoopClock
from tests.support.monitor_values import snapshot_read

FIRST = snapshot_read(0.0, seq=0, host_read_at=None)


class Readings:
    """Readings that take some time, and are counted."""

    def __init__(self, takes: float = 0.0) -> None:
        self.takes = takes
        self.times: list[float] = []

    async def collect(self) -> Snapshot:
        loop = asyncio.get_running_loop()
        self.times.append(round(loop.time(), 3))
        await asyncio.sleep(self.takes)
        return replace(FIRST, seq=len(self.times), taken_at=loop.time())


@asynccontextmanager
async def sampling(readings: Readings, period: float = 1.0) -> AsyncGenerator[Sampler, None]:
    sampler = Sampler(readings.collect, period, LoopClock())
    async with TaskScope() as tasks:
        tasks.spawn("sampler", sampler.run())
        yield sampler


pytestmark = pytest.mark.looptime


async def test_it_reads_once_a_period_and_keeps_the_rhythm() -> None:
    readings = Readings(takes=0.3)
    async with sampling(readings):
        await asyncio.sleep(3.5)
    assert readings.times == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("period", [0.1, 0.5, 1.0, 2.0, 15.0])
async def test_the_watch_of_the_event_loop_sees_what_each_reading_blocks(
    period: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    passed, blocked = loop.time, 0.0
    monkeypatch.setattr(loop, "time", lambda: passed() + blocked)

    async def collect() -> Snapshot:
        nonlocal blocked
        blocked += period / 10
        return FIRST

    meter = ProgramMeter("agent", LAG_PERIOD)
    async with TaskScope() as tasks:
        tasks.spawn("sampler", Sampler(collect, period, LoopClock()).run())
        tasks.spawn("watch", meter.watch_loop())
        await asyncio.sleep(60 * LAG_PERIOD)
    on_time, late = meter.lag.counts[0], sum(meter.lag.counts[1:])
    assert on_time + late <= 60
    assert 3 <= late < on_time


async def test_a_reading_longer_than_the_period_skips_ticks_and_does_not_pile_up() -> None:
    readings = Readings(takes=2.5)
    async with sampling(readings):
        await asyncio.sleep(7.0)
    assert readings.times == [0.0, 3.0, 6.0]


async def test_a_snapshot_that_is_young_enough_costs_no_reading() -> None:
    readings = Readings()
    async with sampling(readings, period=10.0) as sampler:
        await sampler.get(max_age=5.0)
        await asyncio.sleep(4.0)
        assert (await sampler.get(max_age=5.0)).seq == 1
        assert readings.times == [0.0]
        await asyncio.sleep(2.0)
        assert (await sampler.get(max_age=5.0)).seq == 2
        assert readings.times == [0.0, 6.0]


async def test_callers_at_the_same_time_share_one_reading() -> None:
    readings = Readings(takes=0.5)
    async with sampling(readings, period=10.0) as sampler:
        await asyncio.sleep(5.0)
        first = [asyncio.create_task(sampler.get(max_age=0.0)) for _ in range(100)]
        await asyncio.sleep(0.2)
        late = [asyncio.create_task(sampler.get(max_age=0.0)) for _ in range(100)]
        found = {(await task).seq for task in (*first, *late)}
        assert found == {2}
        await asyncio.sleep(1.0)
    assert readings.times == [0.0, 5.0]


async def test_a_caller_that_gives_up_takes_the_reading_from_nobody() -> None:
    async with sampling(Readings(takes=0.5), period=10.0) as sampler:
        await asyncio.sleep(5.0)
        impatient, patient = (asyncio.create_task(sampler.get(max_age=0.0)) for _ in range(2))
        await asyncio.sleep(0.1)
        impatient.cancel()
        assert (await patient).seq == 2


async def test_however_many_ask_the_driver_has_a_pause_between_readings() -> None:
    readings = Readings()
    async with sampling(readings, period=10.0) as sampler:
        for _ in range(20):
            await sampler.get(max_age=0.0)
    assert readings.times == [round(0.1 * number, 3) for number in range(20)]


async def test_readings_on_demand_do_not_shift_the_rhythm() -> None:
    readings = Readings()
    async with sampling(readings) as sampler:
        await asyncio.sleep(0.4)
        await sampler.get(max_age=0.0)
        await asyncio.sleep(2.0)
    assert readings.times == [0.0, 0.4, 1.0, 2.0]


async def test_subscribers_get_every_snapshot_or_the_newest_and_a_count() -> None:
    async with sampling(Readings()) as sampler:
        quick, slow = sampler.snapshots.follow(), sampler.snapshots.follow()
        for number in range(1, 6):
            assert (await anext(quick))[0].seq == number
            if number == 1:
                await anext(slow)
        for told in ((5, 3), (6, 0)):
            snapshot, dropped = await anext(slow)
            assert (snapshot.seq, dropped) == told


async def test_a_subscriber_begins_with_the_newest_value_and_leaves_nothing_behind() -> None:
    broadcast: Broadcast[int] = Broadcast()
    broadcast.publish(1)
    broadcast.publish(2)
    async with aclosing(broadcast.follow()) as values:
        assert await anext(values) == (2, 0)
        assert broadcast.followers == 1
    assert broadcast.followers == 0


async def test_what_comes_within_the_interval_of_a_subscriber_is_not_missed() -> None:
    broadcast: Broadcast[int] = Broadcast()
    values = broadcast.follow(1.0)
    broadcast.publish(1)
    assert await anext(values) == (1, 0)
    for value in (2, 3, 4):
        broadcast.publish(value)
    assert await anext(values) == (4, 0)
    assert broadcast.dropped == 0
