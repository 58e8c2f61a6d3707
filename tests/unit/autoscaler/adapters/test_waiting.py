"""A replica that an engine cannot start yet: asked for again and again, and dropped without a trace where it is not wanted."""

import pytest

from gpuscale.autoscaler.adapters.engine import (
    Desired,
    Goal,
    Life,
    Remove,
    ReplicaOrder,
    Sighting,
    Start,
    Step,
)
from gpuscale.autoscaler.adapters.journal import Phase, Record
from gpuscale.autoscaler.adapters.steps import (
    GONE,
    NEVER_STARTED,
    Plan,
    Situation,
    plan_steps,
    refused,
    reports,
)
from gpuscale.autoscaler.domain.replicas import ReplicaReport, ReplicaState

ONE = "endpoints/e/replicas/one"
WAITS = Sighting(Life.WAITING, reason="pulling its image")
INTENT = Record(ONE, Phase.INTENT, "boot")
STARTS: list[Step] = [Start(ReplicaOrder(ONE, "endpoints/e", {}), "worker")]


def plan(goal: Goal, record: Record | None, most: int = 0) -> Plan:
    desired = Desired(ReplicaOrder(ONE, "endpoints/e", {}), goal, "worker")
    return plan_steps(
        Situation(
            wanted={ONE: desired},
            seen={ONE: WAITS},
            records={ONE: record} if record else {},
            missing_since={},
            now=1000.0,
            boot_id="boot",
            most=most,
        )
    )


@pytest.mark.parametrize("most", [0, 1])
def test_its_start_is_repeated_and_it_counts_once(most: int) -> None:
    assert plan(Goal.RUN, INTENT, most) == Plan(steps=STARTS)


def test_it_is_reported_as_starting_with_what_it_waits_for() -> None:
    assert reports({ONE: WAITS}, {ONE: INTENT}, ()) == {
        ONE: ReplicaReport(ReplicaState.STARTING, reason="pulling its image")
    }


def test_one_that_should_stop_is_dropped_and_was_never_started() -> None:
    """What was prepared of it goes first: a crash in between drops it again, and leaves nothing behind."""
    stopped = Record(ONE, Phase.ENDED, "boot", reason=NEVER_STARTED)
    assert plan(Goal.STOP, INTENT) == Plan(steps=[Remove(ONE)], done=[stopped])
    assert plan(Goal.STOP, None) == Plan(steps=[Remove(ONE)], done=[stopped])


def test_what_is_left_of_one_that_was_refused_is_removed_and_not_reported() -> None:
    no = refused(ONE, "no such runtime", "boot")
    assert plan(Goal.RUN, no) == Plan(steps=[Remove(ONE)])
    assert reports({ONE: WAITS}, {ONE: no}, ())[ONE].state is ReplicaState.FAILED


def test_one_that_ran_before_is_not_started_again() -> None:
    ran = Record(ONE, Phase.RUNNING, "boot")
    found = plan(Goal.RUN, ran)
    assert found.steps == []
    assert [(one.phase, one.failed, one.reason) for one in found.write] == [(Phase.ENDED, True, GONE)]


def test_it_can_be_forgotten() -> None:
    assert plan(Goal.FORGET, INTENT) == Plan(steps=[Remove(ONE)], forget=[ONE])
