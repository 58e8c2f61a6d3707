"""All replicas of an adapter on an engine: seen for what they are, and not held up by one whose steps fail. Silence: test_crew_machine.py."""

import asyncio
import errno
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gpuscale.autoscaler.adapters.crew import AT_A_TIME, FRESH, EngineCrew
from gpuscale.autoscaler.adapters.engine import (
    Desired,
    Finish,
    Kill,
    Remove,
    ReplicaOrder,
    Sighting,
    Start,
    Step,
    WorkerLife,
)
from gpuscale.autoscaler.adapters.journal import Journal, JournalRecord, Phase
from gpuscale.autoscaler.adapters.steps import KILLED
from gpuscale.autoscaler.domain.replicas import Goal, ReplicaReport, ReplicaState
from gpuscale.common.runtime.tasks import TaskScope
from tests.support.clock import LoopClock, ManualClock
from tests.support.fake_engine import FakeEngine
from tests.support.waiting import eventually

pytestmark = pytest.mark.looptime

ONE, TWO, THREE = (f"endpoints/e/replicas/{name}" for name in ("one", "two", "three"))


@pytest.fixture(autouse=True)
def _journal_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual time goes on while a thread writes, by as much as the machine is busy."""

    async def here(work: Callable[..., object], *arguments: object) -> object:
        await asyncio.sleep(0)
        return work(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", here)


def desired(name: str = ONE, goal: Goal = Goal.RUN, drain: float | None = None) -> Desired:
    return Desired(ReplicaOrder(name, "endpoints/e", {}), goal, "worker", drain)


@asynccontextmanager
async def running(
    engine: FakeEngine, journal: Journal | Path, clock: ManualClock | None = None
) -> AsyncGenerator[EngineCrew]:
    """A crew at work, until the block ends as if it had been killed: its replicas go on."""
    kept = Journal(journal) if isinstance(journal, Path) else journal
    crew = EngineCrew(engine, kept, kept.load(), clock or LoopClock(), asyncio.Event())
    async with TaskScope() as tasks:
        tasks.spawn("crew", crew.run())
        yield crew


async def state(crew: EngineCrew, expected: ReplicaState, name: str = ONE) -> ReplicaReport:
    await eventually(
        lambda: (crew.reports() or {}).get(name, ReplicaReport(ReplicaState.UNKNOWN)).state is expected
    )
    return (crew.reports() or {})[name]


class BusyClock(LoopClock):
    """The clock of a busy machine: it moves between two looks at it, and is a little behind the timers of the loop."""

    def __init__(self, behind: float) -> None:
        super().__init__()
        self.behind, self.looks = behind, 0

    def now(self) -> float:
        self.looks += 1
        return super().now() * (1 - self.behind) + self.looks / 1000


@pytest.mark.parametrize("behind", [0.0, 0.0042, 0.0045, 0.0048])
async def test_a_drain_that_is_over_between_two_looks_at_the_clock_is_ended_at_once(
    tmp_path: Path, behind: float
) -> None:
    engine = FakeEngine()
    async with running(engine, tmp_path, BusyClock(behind)) as crew:
        crew.apply([desired()])
        engine.show(ONE, Sighting(WorkerLife.READY))
        await state(crew, ReplicaState.READY)
        began = asyncio.get_running_loop().time()
        crew.apply([desired(goal=Goal.STOP, drain=5.0)])
        await eventually(lambda: bool(engine.of(Kill)))
        assert asyncio.get_running_loop().time() - began < 5.5
        assert (await state(crew, ReplicaState.STOPPED)).reason == KILLED


async def test_what_is_about_to_start_when_all_are_to_end_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go = asyncio.Event(), asyncio.Event()

    async def slowly(work: Callable[..., object], *arguments: object) -> object:
        writing.set()
        await go.wait()
        return work(*arguments)

    engine = FakeEngine()
    async with running(engine, tmp_path) as crew:
        crew.apply([desired()])
        await state(crew, ReplicaState.STARTING)
        monkeypatch.setattr(asyncio, "to_thread", slowly)
        crew.apply([desired(), desired(TWO)])
        await writing.wait()
        ending, began = asyncio.create_task(crew.end_all(5.0)), asyncio.get_running_loop().time()
        await asyncio.sleep(1.0)
        go.set()
        await ending
        assert asyncio.get_running_loop().time() - began == pytest.approx(5.0, abs=0.1)
        found = crew.reports() or {}
    assert (found[ONE].state, found[TWO].state) == (ReplicaState.STOPPED, ReplicaState.STOPPED)
    assert [step.replica for step in engine.of(Start)] == [ONE]


async def test_a_replica_that_is_not_shown_for_a_moment_stands_as_it_stood(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with running(engine, tmp_path) as crew:
        crew.apply([desired()])
        await state(crew, ReplicaState.STARTING)
        engine.show(ONE, Sighting(WorkerLife.READY))
        await state(crew, ReplicaState.READY)
        engine.hidden.add(ONE)
        await asyncio.sleep(5)
        assert (crew.reports() or {})[ONE].state is ReplicaState.READY
        await state(crew, ReplicaState.FAILED)
    assert engine.starts == {ONE: 1}


class FullDisk(Journal):
    """Nothing can be written to it of those for whom it is full."""

    full: Collection[str] = ()

    def write(self, records: Iterable[JournalRecord]) -> dict[str, OSError]:
        full = [one for one in records if one.replica in self.full]
        written = super().write([one for one in records if one not in full])
        return written | {one.replica: OSError(errno.ENOSPC, "No space left") for one in full}


async def test_on_a_full_disk_nothing_starts_and_what_should_stop_stops(tmp_path: Path) -> None:
    """It is asked to finish once, not with every look: for many a second SIGTERM means at once."""
    engine, journal = FakeEngine(), FullDisk(tmp_path)
    async with running(engine, journal) as crew:
        crew.apply([desired()])
        await state(crew, ReplicaState.STARTING)
        journal.full = {ONE, THREE}
        crew.apply([desired(goal=Goal.STOP, drain=30.0), desired(TWO), desired(THREE)])
        await asyncio.sleep(25)
        assert engine.of(Finish) == [Finish(ONE, 30.0)]
        assert engine.of(Kill) == []
        assert (TWO in engine.starts, crew.failures["apply", "JOURNAL_UNWRITABLE"] > 1) == (False, True)
        for name in (TWO, THREE):
            why = (await state(crew, ReplicaState.STARTING, name)).reason
            assert why == "its adapter cannot write its journal: No space left"
        crew.apply([desired(goal=Goal.STOP, drain=30.0), desired(TWO), desired(THREE, goal=Goal.STOP)])
        assert THREE not in (crew.reports() or {}), "it never was, and its GPUs are free at once"
        await state(crew, ReplicaState.STOPPED)
        journal.full = ()
        await eventually(lambda: TWO in engine.starts)
        assert (await state(crew, ReplicaState.STARTING, TWO)).reason == ""
    assert engine.starts == {ONE: 1, TWO: 1}


class CountingJournal(Journal):
    """Counts how often it is written to."""

    writes = 0

    def write(self, records: Iterable[JournalRecord]) -> dict[str, OSError]:
        self.writes += 1
        return super().write(records)


async def test_what_many_replicas_do_at_once_is_written_at_once(tmp_path: Path) -> None:
    """At most `AT_A_TIME` steps are taken between two observations, and recorded together."""
    names = [f"endpoints/e/replicas/r{number}" for number in range(AT_A_TIME)]
    engine, journal = FakeEngine(), CountingJournal(tmp_path)
    async with running(engine, journal) as crew:
        crew.apply([desired(name) for name in names])
        await state(crew, ReplicaState.STARTING, names[-1])
        await asyncio.sleep(1)
        before = journal.writes
        crew.apply([desired(name, Goal.STOP) for name in names])
        await state(crew, ReplicaState.DRAINING, names[-1])
        assert (len(engine.of(Finish)), journal.writes - before) == (AT_A_TIME, 1)


async def test_an_engine_whose_watch_hangs_is_looked_at_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()

    async def hang() -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(engine, "watch", hang)
    async with running(engine, tmp_path) as crew:
        crew.apply([desired()])
        await state(crew, ReplicaState.STARTING)
        await asyncio.sleep(1)
        [kept] = Journal(tmp_path).load()
        assert kept.phase is Phase.RUNNING, "what came of a step is looked at without waiting for the engine"
        engine.show(ONE, Sighting(WorkerLife.READY))
        await asyncio.sleep(FRESH + 1)
        await state(crew, ReplicaState.READY)


async def test_what_an_engine_takes_and_does_not_do_is_counted_by_reason(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with running(engine, tmp_path) as crew:
        crew.apply([desired()])
        await state(crew, ReplicaState.STARTING)
        assert +crew.failures == {}
        assert sum(crew.spent["apply"].counts) >= 1
        looks = sum(crew.spent["observe"].counts)
        engine.away = "it is restarted"
        engine.changed.set()
        await eventually(lambda: crew.failures["observe", "UNAVAILABLE"] >= 2)
        assert sum(crew.spent["observe"].counts) >= looks + 2
        engine.away, engine.stuck = "", {ONE: "it hangs"}
        crew.apply([desired(goal=Goal.STOP, drain=5.0)])
        await eventually(lambda: crew.failures["apply", "STEP_FAILED"] >= 1)
        engine.stuck, engine.refuses = {}, "no such image"
        crew.apply([desired(TWO)])
        await eventually(lambda: crew.failures["apply", "REFUSED"] == 1)


@pytest.mark.parametrize("stuck", [Goal.RUN, Goal.STOP], ids=["start", "stop"])
async def test_the_others_are_asked_once_killed_in_time_started_and_forgotten(
    tmp_path: Path, stuck: Goal
) -> None:
    engine = FakeEngine()
    async with running(engine, tmp_path) as crew:
        wanted = [desired(TWO), *([desired(ONE)] if stuck is Goal.STOP else [])]
        crew.apply(wanted)
        await eventually(lambda: len(engine.has) == len(wanted))
        engine.stuck[ONE] = "its device is hung"
        crew.apply([desired(ONE, stuck, 1.0), desired(TWO, Goal.STOP, 5.0), desired(THREE)])
        await eventually(lambda: engine.of(Kill), timeout=60)
        assert engine.of(Finish).count(Finish(TWO, 5.0)) == 1
        await eventually(lambda: THREE in engine.starts, timeout=60)
        crew.apply([desired(ONE, stuck, 1.0), desired(TWO, Goal.FORGET), desired(THREE)])
        await eventually(lambda: TWO not in (crew.reports() or (TWO,)), timeout=60)
        assert Remove(TWO) in engine.taken
        assert not any(isinstance(step, Kill) and step.replica == ONE for step in engine.taken)
        engine.stuck.clear()
        at_last = (
            (lambda: Kill(ONE) in engine.taken) if stuck is Goal.STOP else (lambda: ONE in engine.starts)
        )
        await eventually(at_last, timeout=60)


class Slow(FakeEngine):
    """Takes its time for each step."""

    async def apply(self, steps: Sequence[Step]) -> Mapping[str, str]:
        for _ in steps:
            await asyncio.sleep(0.5)
        return await super().apply(steps)


async def test_what_is_reported_stays_fresh_while_many_steps_are_taken_and_ends_come_first(
    tmp_path: Path,
) -> None:
    engine = Slow()
    async with running(engine, tmp_path) as crew:
        crew.apply([desired(TWO)])
        await eventually(lambda: TWO in engine.has)
        many = [f"endpoints/e/replicas/r{number:02}" for number in range(60)]
        crew.apply([desired(TWO, Goal.STOP, 5.0), *(desired(name) for name in many)])
        while len(engine.has) <= len(many):
            assert crew.reports() is not None
            await asyncio.sleep(1)
        assert engine.taken[1] == Finish(TWO, 5.0)
        assert engine.starts == dict.fromkeys([TWO, *many], 1)
