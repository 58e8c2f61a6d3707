"""From what an engine has to what is wanted: the next steps, taken one by one, and what is reported."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import pytest

from gpuscale.autoscaler.adapters.engine import (
    Desired,
    EngineUnavailableError,
    Finish,
    Kill,
    LaunchRefusedError,
    Remove,
    ReplicaOrder,
    Sighting,
    Start,
    StepsFailedError,
    StepwiseEngine,
    WorkerLife,
    split_duplicates,
)
from gpuscale.autoscaler.adapters.journal import JournalRecord, Phase
from gpuscale.autoscaler.adapters.steps import (
    ENDED_ASKED,
    GONE,
    KILLED,
    NEVER_STARTED,
    VANISHED_AFTER,
    Situation,
    StepPlan,
    plan_steps,
    refused,
    reports,
)
from gpuscale.autoscaler.domain.replicas import Goal, ReplicaReport, ReplicaState

ONE, TWO = "endpoints/e/replicas/one", "endpoints/e/replicas/two"
NOW = 1000.0
RUNS = Sighting(WorkerLife.READY, pid=7)
OVER = Sighting(WorkerLife.ENDED, 3, "exit code 3")
WAITS = Sighting(WorkerLife.WAITING, reason="pulling its image")


def wanted(name: str = ONE, goal: Goal = Goal.RUN, drain: float | None = None) -> dict[str, Desired]:
    return {name: Desired(ReplicaOrder(name, "endpoints/e", {}), goal, "worker", drain)}


def record(phase: Phase = Phase.RUNNING, asked: float | None = None, boot: str = "boot") -> JournalRecord:
    return JournalRecord(ONE, phase, boot, asked_to_stop_at=asked)


def situation(
    want: dict[str, Desired],
    seen: Sighting | None = None,
    kept: JournalRecord | None = None,
    missing: float = 0.0,
    most: int = 0,
) -> Situation:
    return Situation(
        wanted=want,
        seen={ONE: seen} if seen else {},
        records={ONE: kept} if kept else {},
        missing_since={ONE: NOW - missing},
        now=NOW,
        boot_id="boot",
        most=most,
    )


def test_what_is_missing_is_written_down_and_started() -> None:
    plan = plan_steps(situation(wanted()))
    assert plan.write == [record(Phase.INTENT)]
    assert plan.starts == [Start(wanted()[ONE].order, "worker")]


def test_a_start_whose_answer_was_lost_is_asked_for_again() -> None:
    plan = plan_steps(situation(wanted(), kept=record(Phase.INTENT), missing=100.0))
    assert plan == StepPlan(starts=[Start(wanted()[ONE].order, "worker")])


def test_what_runs_is_noted_once_and_left_alone() -> None:
    assert plan_steps(situation(wanted(), RUNS, record(Phase.INTENT))) == StepPlan(write=[record()])
    assert plan_steps(situation(wanted(), RUNS, record())) == StepPlan()


@pytest.mark.parametrize(("goal", "reason"), [(Goal.RUN, GONE), (Goal.STOP, ENDED_ASKED)])
def test_what_the_engine_lost_counts_as_ended_only_after_a_while(goal: Goal, reason: str) -> None:
    """A listing that is a moment late must neither free GPUs nor start a second one."""
    early = situation(wanted(goal=goal), kept=record(), missing=VANISHED_AFTER - 0.1)
    assert plan_steps(early) == StepPlan()
    plan = plan_steps(situation(wanted(goal=goal), kept=record(), missing=VANISHED_AFTER))
    assert plan.steps == plan.starts == []
    assert [(one.phase, one.failed, one.reason) for one in plan.write] == [
        (Phase.ENDED, goal is Goal.RUN, reason)
    ]


def test_one_that_ran_is_not_started_again_where_the_engine_has_it_back_at_the_beginning() -> None:
    """As a container that somebody removed and made anew, or a job that was put back into the queue."""
    at = situation(wanted(), Sighting(WorkerLife.WAITING), record())
    plan = plan_steps(replace(at, missing_since={}))
    assert plan.steps == plan.starts == []
    [gone] = plan.write
    assert (gone.phase, gone.failed, gone.reason) == (Phase.ENDED, True, GONE)
    assert plan_steps(replace(at, records={ONE: gone})) == StepPlan(steps=[Remove(ONE)])


def test_what_was_never_started_and_should_stop_has_stopped() -> None:
    plan = plan_steps(situation(wanted(goal=Goal.STOP)))
    assert [(one.phase, one.failed, one.reason) for one in plan.write] == [
        (Phase.ENDED, False, NEVER_STARTED)
    ]


def test_a_stop_waits_while_its_start_may_be_under_way() -> None:
    plan = plan_steps(situation(wanted(goal=Goal.STOP), kept=record(Phase.INTENT), missing=1.0))
    assert plan == StepPlan()


def test_it_is_asked_to_finish_before_that_is_written_down() -> None:
    """A crash in between asks twice; the other way round it might never be asked."""
    plan = plan_steps(situation(wanted(goal=Goal.STOP, drain=30.0), RUNS, record()))
    assert plan == StepPlan(steps=[Finish(ONE, 30.0)], done=[record(asked=NOW)])


@pytest.mark.parametrize(
    ("drain", "asked", "boot", "steps"),
    [
        (30.0, NOW - 29.9, "boot", []),
        (30.0, NOW - 30.0, "boot", [Kill(ONE)]),
        (None, NOW - 9999.0, "boot", []),
        (30.0, NOW - 9999.0, "an earlier boot", []),
    ],
    ids=["in time", "out of time", "for ever", "an earlier boot"],
)
def test_it_is_killed_when_its_time_is_over(
    drain: float | None, asked: float, boot: str, steps: list[Kill]
) -> None:
    plan = plan_steps(situation(wanted(goal=Goal.STOP, drain=drain), RUNS, record(asked=asked, boot=boot)))
    assert plan.steps == steps
    assert plan.done == []  # which is written after a step alone
    assert [one.asked_to_stop_at for one in plan.write] == ([NOW] if boot != "boot" else [])


def test_what_ended_is_kept_until_the_autoscaler_has_noted_it() -> None:
    [kept] = plan_steps(situation(wanted(), OVER, record())).write
    assert plan_steps(situation(wanted(), OVER, kept)) == StepPlan()
    plan = plan_steps(situation(wanted(goal=Goal.FORGET), OVER, kept))
    assert plan == StepPlan(steps=[Remove(ONE)], forget=[ONE])


@pytest.mark.parametrize("asked", [None, 5.0])
def test_how_it_ended_is_known_when_the_engine_has_forgotten_it(asked: float | None) -> None:
    """Slurm forgets a job within minutes, and an autoscaler may be away for longer."""
    goal = Goal.RUN if asked is None else Goal.STOP
    [kept] = plan_steps(situation(wanted(goal=goal), OVER, record(asked=asked))).write
    assert plan_steps(situation(wanted(goal=goal), None, kept, missing=100.0)) == StepPlan()
    assert reports({}, {ONE: kept}, ()) == reports({ONE: OVER}, {ONE: record(asked=asked)}, ())


def test_what_runs_is_never_forgotten() -> None:
    assert plan_steps(situation(wanted(goal=Goal.FORGET), RUNS, record())) == StepPlan()
    assert plan_steps(situation(wanted(goal=Goal.FORGET), None, record())) == StepPlan()


def test_a_refused_one_is_not_tried_again_and_can_be_forgotten() -> None:
    no = refused(ONE, "no such image", "boot")
    assert plan_steps(situation(wanted(), kept=no)) == StepPlan()
    assert plan_steps(situation(wanted(goal=Goal.FORGET), kept=no)) == StepPlan(forget=[ONE])


def test_no_more_than_the_adapter_may_run() -> None:
    plan = plan_steps(situation(wanted(TWO), RUNS, record(), most=1))
    assert plan.starts == []
    assert [(one.replica, one.failed) for one in plan.write] == [(TWO, True)]
    assert plan_steps(situation(wanted(TWO), OVER, record(), most=1)).starts != []


@pytest.mark.parametrize(("missing", "room"), [(VANISHED_AFTER - 0.1, 0), (VANISHED_AFTER, 1)])
def test_what_is_not_shown_for_a_moment_keeps_its_place(missing: float, room: int) -> None:
    plan = plan_steps(situation(wanted(TWO), None, record(), missing=missing, most=1))
    assert len(plan.starts) == room


def test_a_start_that_is_under_way_takes_a_place() -> None:
    """Whatever its name: the one that waits stands behind the new one in the alphabet."""
    at = situation(wanted(ONE) | wanted(TWO), most=1)
    plan = plan_steps(replace(at, records={TWO: replace(record(Phase.INTENT), replica=TWO)}))
    assert plan.starts == [Start(wanted(TWO)[TWO].order, "worker")]
    assert [(one.replica, one.failed) for one in plan.write] == [(ONE, True)]


@pytest.mark.parametrize(
    ("sighting", "asked", "state"),
    [
        (Sighting(WorkerLife.STARTING), None, ReplicaState.STARTING),
        (RUNS, None, ReplicaState.READY),
        (RUNS, 5.0, ReplicaState.DRAINING),
        (OVER, None, ReplicaState.FAILED),
        (OVER, 5.0, ReplicaState.STOPPED),
    ],
    ids=["starting", "ready", "draining", "failed", "stopped"],
)
def test_what_is_reported(sighting: Sighting, asked: float | None, state: ReplicaState) -> None:
    """An end that nobody asked for is a failure, whatever its exit code."""
    told = reports({ONE: sighting}, {ONE: record(asked=asked)}, ())[ONE]
    assert told == ReplicaReport(state, sighting.pid, sighting.exit_code, sighting.reason)


def test_what_is_reported_of_one_that_waits_or_was_killed_or_is_not_ours() -> None:
    assert reports({ONE: WAITS}, {ONE: record(Phase.INTENT)}, ()) == {
        ONE: ReplicaReport(ReplicaState.STARTING, reason="pulling its image")
    }
    killed = Sighting(WorkerLife.ENDED, -9)
    assert reports({ONE: killed}, {ONE: record(asked=1.0)}, [ONE])[ONE].reason == KILLED
    assert reports({ONE: RUNS}, {}, ())[ONE].state is ReplicaState.READY, "the autoscaler stops it for that"


def test_what_is_written_down_alone() -> None:
    ended = replace(record(Phase.ENDED), failed=True, reason="refused")
    assert reports({}, {ONE: ended}, ())[ONE] == ReplicaReport(ReplicaState.FAILED, reason="refused")
    assert reports({}, {ONE: record(Phase.INTENT)}, ())[ONE] == ReplicaReport(ReplicaState.STARTING)


def waiting(goal: Goal, kept: JournalRecord | None, most: int = 0) -> StepPlan:
    return plan_steps(replace(situation(wanted(goal=goal), WAITS, kept, most=most), missing_since={}))


@pytest.mark.parametrize("most", [0, 1])
def test_the_start_of_one_that_waits_is_repeated_and_counts_once(most: int) -> None:
    assert waiting(Goal.RUN, record(Phase.INTENT), most) == StepPlan(
        starts=[Start(wanted()[ONE].order, "worker")]
    )


@pytest.mark.parametrize("kept", [record(Phase.INTENT), None])
def test_one_that_waits_and_should_stop_is_dropped_and_was_never_started(kept: JournalRecord | None) -> None:
    """What was prepared of it goes first: a crash in between drops it again, and leaves nothing behind."""
    stopped = JournalRecord(ONE, Phase.ENDED, "boot", reason=NEVER_STARTED)
    assert waiting(Goal.STOP, kept) == StepPlan(steps=[Remove(ONE)], done=[stopped])
    assert waiting(Goal.FORGET, kept) == StepPlan(steps=[Remove(ONE)], forget=[ONE])


def test_what_is_left_of_one_that_was_refused_is_removed_and_not_reported() -> None:
    no = refused(ONE, "no such runtime", "boot")
    assert waiting(Goal.RUN, no) == StepPlan(steps=[Remove(ONE)])
    assert reports({ONE: WAITS}, {ONE: no}, ())[ONE].state is ReplicaState.FAILED


def test_what_the_engine_finds_a_replica_by_is_kept_with_its_record() -> None:
    found = replace(RUNS, kept={"pid": 7})
    [kept] = plan_steps(situation(wanted(), found, record())).write
    assert kept.kept == {"pid": 7}
    assert plan_steps(situation(wanted(), found, kept)) == StepPlan()


class Stubborn(StepwiseEngine):
    """Refuses to start, and fails to kill."""

    def __init__(self) -> None:
        self.taken: list[str] = []

    async def observe(self) -> Mapping[str, Sighting]:
        return {}

    async def watch(self) -> None:
        pass

    async def start(self, step: Start) -> None:
        raise LaunchRefusedError(f"no {step.template}")

    async def finish(self, step: Finish) -> None:
        self.taken.append(f"finish {step.replica} in {step.drain_timeout}")

    async def kill(self, replica: str) -> None:
        raise EngineUnavailableError(f"cannot kill {replica}")

    async def remove(self, replica: str) -> None:
        self.taken.append(f"remove {replica}")


def test_a_step_that_fails_holds_up_no_other() -> None:
    engine = Stubborn()
    start = Start(ReplicaOrder("a", "e", {}), "worker")
    assert asyncio.run(engine.apply([start, Remove("d")])) == {"a": "no worker"}
    with pytest.raises(StepsFailedError, match="cannot kill b") as caught:
        asyncio.run(engine.apply([start, Kill("b"), Finish("c", 5.0)]))
    assert (caught.value.failed, caught.value.refused) == ({"b": "cannot kill b"}, {"a": "no worker"})
    assert engine.taken == ["remove d", "finish c in 5.0"]


def test_of_a_replica_that_was_started_twice_the_older_counts() -> None:
    """The answer to the first start was lost."""
    found = [("a", 9), ("b", 7), ("a", 8), (None, 1)]
    assert split_duplicates(found, lambda number: number) == ({"a": 8, "b": 7}, [9])
