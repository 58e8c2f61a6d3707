"""A crew and its engine, whatever happens: answers that get lost, a deaf engine, crashes of the adapter, reboots."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpuscale.autoscaler.adapters import engine
from gpuscale.autoscaler.adapters.crew import FRESH, EngineCrew
from gpuscale.autoscaler.adapters.journal import Journal, JournalRecord, Phase
from gpuscale.autoscaler.adapters.steps import VANISHED_AFTER
from gpuscale.autoscaler.domain.replicas import ENDED, Goal
from tests.support.clock import ManualClock
from tests.support.fake_engine import FakeEngine

NAMES = [f"endpoints/e/replicas/{name}" for name in "ab"]
DRAIN = 7.0
NAME = st.sampled_from(NAMES)


class MemoryJournal(Journal):
    """What is written is kept, crash or not."""

    def __init__(self) -> None:
        super().__init__(Path("/nowhere"))
        self.records: dict[str, JournalRecord] = {}

    def load(self) -> list[JournalRecord]:
        return list(self.records.values())

    def write(self, records: Iterable[JournalRecord]) -> dict[str, OSError]:
        self.records |= {record.replica: record for record in records}
        return {}

    def remove(self, replicas: Iterable[str]) -> None:
        for replica in replicas:
            self.records.pop(replica, None)


class LossyEngine(FakeEngine):
    """`loses` the answers to what it was told, after it took so many steps of it (-1: all); None: no answer is lost."""

    loses: int | None = None

    async def apply(self, steps: Sequence[engine.Step]) -> Mapping[str, str]:
        self._answer()
        taken = steps if self.loses is None or self.loses < 0 else steps[: self.loses]
        refused = await super().apply(taken)
        if self.loses is not None:
            raise engine.EngineUnavailableError("the answer was lost")
        return refused


class CrewMachine(RuleBasedStateMachine):
    """The autoscaler's part: a replica is wanted, then it should stop, then, once it ended, it is forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.clock = ManualClock()
        self.elapsed = 0.0
        self.engine = LossyEngine()
        self.journal = MemoryJournal()
        self.goals: dict[str, Goal] = {}
        self.finish_asked: dict[str, float] = {}
        self.boots = 0

    @initialize()
    def begin(self) -> None:
        self.crew = EngineCrew(self.engine, self.journal, self.journal.load(), self.clock, asyncio.Event())

    @rule(name=NAME)
    def want(self, name: str) -> None:
        self.goals.setdefault(name, Goal.RUN)
        self.tell()

    @rule(name=NAME)
    def stop(self, name: str) -> None:
        if self.goals.get(name) is Goal.RUN:
            self.goals[name] = Goal.STOP
            self.tell()

    @rule(name=NAME)
    def forget(self, name: str) -> None:
        report = (self.crew.reports() or {}).get(name)
        if name in self.goals and report is not None and report.state in ENDED:
            self.goals[name] = Goal.FORGET
            self.tell()

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0, 11.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.elapsed += seconds

    @rule(loses=st.sampled_from([None, None, None, -1, 0, 1]))
    def look(self, loses: int | None) -> None:
        self.engine.loses = loses
        self.round()
        self.engine.loses = None

    @rule()
    def look_while_the_engine_is_away(self) -> None:
        taken = len(self.engine.taken)
        self.engine.away = "away"
        self.round()
        self.engine.away = ""
        assert len(self.engine.taken) == taken

    @rule(loses=st.booleans())
    def crash(self, loses: bool) -> None:
        """In the middle of a round too: its steps were taken, and the adapter never heard of it."""
        if loses:
            self.look(-1)
        self.begin()
        self.tell()

    @precondition(lambda self: self.boots < 3)
    @rule()
    def reboot(self) -> None:
        self.boots += 1
        self.clock.reboot(f"boot {self.boots}")
        self.begin()
        self.tell()

    @rule(name=NAME, life=st.sampled_from([engine.WorkerLife.READY, engine.WorkerLife.ENDED]))
    def it_gets_on(self, name: str, life: engine.WorkerLife) -> None:
        if name in self.engine.has and self.engine.has[name].life is not engine.WorkerLife.ENDED:
            self.engine.has[name] = engine.Sighting(life, 1 if life is engine.WorkerLife.ENDED else None)

    @rule(name=NAME)
    def it_is_not_listed_for_a_moment(self, name: str) -> None:
        self.engine.hidden.add(name)
        self.round()
        self.engine.hidden.clear()

    @rule(name=NAME)
    def somebody_removes_it(self, name: str) -> None:
        record = self.journal.records.get(name)
        if record is not None and record.phase is Phase.RUNNING:
            self.engine.has.pop(name, None)

    @invariant()
    def nothing_is_started_twice(self) -> None:
        assert all(count == 1 for count in self.engine.starts.values())

    @invariant()
    def old_news_is_no_news(self) -> None:
        seen_at = self.crew._seen_at if hasattr(self, "crew") else None
        if hasattr(self, "crew") and (seen_at is None or self.clock.now() - seen_at > FRESH):
            assert self.crew.reports() is None

    def tell(self) -> None:
        orders = {name: engine.ReplicaOrder(name, "endpoints/e", {}) for name in self.goals}
        of = [engine.Desired(orders[name], goal, "worker", DRAIN) for name, goal in self.goals.items()]
        self.crew.apply(of)

    def round(self) -> None:
        """One round, and a look at what the engine was told in it."""
        before = len(self.engine.taken)
        with suppress(engine.EngineUnavailableError):
            self.loop.run_until_complete(self.crew._round())
        for step in self.engine.taken[before:]:
            if isinstance(step, engine.Finish):
                assert self.goals[step.replica] is Goal.STOP
                self.finish_asked.setdefault(step.replica, self.elapsed)
            elif isinstance(step, engine.Kill):
                assert self.elapsed - self.finish_asked[step.replica] >= DRAIN

    def teardown(self) -> None:
        """With an engine that answers, whatever should stop has ended, and can be forgotten without a trace."""
        if hasattr(self, "crew"):
            # What was forgotten and is still reported is a stray to the autoscaler, which stops it too.
            kept = (self.crew.reports() or {}).keys() | self.journal.records.keys()
            self.goals = {
                name: Goal.STOP
                for name, goal in self.goals.items()
                if goal is not Goal.FORGET or name in kept
            }
            for _ in range(int(DRAIN + VANISHED_AFTER) + 3):
                self.tell()
                self.round()
                self.let_time_pass(1.0)
            reports = self.crew.reports() or {}
            assert {name for name, one in reports.items() if one.state not in ENDED} == set()
            assert reports.keys() >= self.goals.keys()
            self.goals = dict.fromkeys(reports, Goal.FORGET)
            self.tell()
            self.round()
            self.round()
            assert self.journal.records == {}
            assert self.engine.has == {}
            self.nothing_is_started_twice()
        self.loop.close()


TestCrew = CrewMachine.TestCase
TestCrew.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
