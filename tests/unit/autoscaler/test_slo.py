"""The rule of goals: what a replica carries is learnt, queues count, and it is ready ahead for what comes again."""

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from gpuscale.autoscaler.backtest.simulate import run
from gpuscale.autoscaler.backtest.world import Setting
from gpuscale.autoscaler.domain.decisions import Code
from gpuscale.autoscaler.domain.engine import Question, evaluate
from gpuscale.autoscaler.domain.inputs import Carried, Learnt, series_of
from gpuscale.autoscaler.domain.rules.rule import Rule, RuleOutcome, Vote, apply_rule
from gpuscale.autoscaler.domain.rules.slo import UNTRIED, SloRule
from gpuscale.autoscaler.domain.spec import EndpointSpec, ReplicaSignal, ReplicaTemplate, Signal
from gpuscale.autoscaler.wire.decisions import question_from_wire, question_to_wire
from gpuscale.client.traces import Request
from tests.support.autoscaler_values import NOW, inputs, seen

GOALS = SloRule(ttft=0.5, itl=0.04)
GOAL = Rule("goal", "", GOALS)
WELL = {"running": 10.0, "fullest": 10.0, "waiting": 0.0, "requests": 4.0, "served": 4.0, "tokens": 800.0}
FAST = {"ttft": 0.1, "itl": 0.02}
NOTHING = Learnt((), 2, NOW - 600)


def carried(load: float, *, ttft: float = 0.1, itl: float = 0.02, waiting: float = 0.0) -> Carried:
    """A replica that serves a request a second for each five that it has."""
    return Carried(load, load / 5, load * 40, waiting, ttft, itl, NOW)


KNOWN = Learnt((carried(10.0), carried(20.0, itl=0.04), carried(40.0, itl=0.08)), 2, NOW - 600)
"""At 20 requests, which is 4 a second, the time between tokens is that of the goal."""


def look(
    values: Mapping[str, float | None], *, known: Learnt | None = NOTHING, past: Any = None, **fields: Any
) -> RuleOutcome:
    """What the rule makes of values that have been as they are for ever; None: it cannot be had."""
    shown = {f"goal.{name}": seen(value, f"goal.{name}") for name, value in values.items()}
    had = {name: value for name, value in values.items() if value is not None}
    times = [NOW - at for at in range(1000, -1, -5)]
    series = {f"goal.{name}": series_of((at, value) for at in times) for name, value in had.items()}
    fields = {"before": 2, "ready": 2, "startup": 30.0} | fields
    series |= {f"goal.{name}": one for name, one in (past or {}).items()}
    bursts = {} if known is None else {"goal": known}
    return apply_rule(GOAL, inputs(observations=shown, series=series, bursts=bursts, **fields))


def learnt(outcome: RuleOutcome) -> Learnt:
    assert isinstance(outcome.burst, Learnt)
    return outcome.burst


def test_while_nothing_is_known_it_adds_by_what_is_late_and_never_twice_for_the_same() -> None:
    unsteady = {"running": series_of((NOW - at, 10.0 + at) for at in range(1000, -1, -5))}
    late = {**WELL, **FAST, "itl": 0.06}
    first = look(late, before=2, past=unsteady)
    assert (first.vote, first.step.after) == (Vote.UP, 3)
    assert "itl 60 ms of 40 ms" in first.step.text
    assert "not known yet" in first.step.text
    assert look(late, before=3, ready=2, past=unsteady).vote is Vote.NONE
    assert look({**WELL, **FAST}, past=unsteady).vote is Vote.NONE
    # A queue says how many are short, though nobody is late yet.
    queue = {**WELL, **FAST, "waiting": 50.0, "requests": 20.0}
    assert look(queue, past=unsteady).step.after == 10


def test_what_a_replica_carries_is_learnt_while_its_load_is_steady_and_even() -> None:
    [one] = learnt(look({**WELL, **FAST})).carried
    assert (one.load, one.requests, one.tokens, one.ttft, one.itl) == (10.0, 2.0, 400.0, 0.1, 0.02)
    ramp = {"running": series_of((NOW - at, 10.0 + at) for at in range(1000, -1, -5))}
    assert not learnt(look({**WELL, **FAST}, past=ramp)).carried
    # One replica works off an old queue: the latencies are its own, and the mean load is that of all.
    assert not learnt(look({**WELL, **FAST, "fullest": 64.0})).carried
    assert not learnt(look({**WELL, **FAST}, known=replace(NOTHING, since=NOW - 20))).carried
    changed = learnt(look({**WELL, **FAST}, ready=3))
    assert (changed.carried, changed.ready, changed.since) == ((), 3, NOW)
    assert not learnt(look({**WELL, "ttft": 0.1, "itl": None})).carried


def test_a_load_that_is_seen_again_is_mixed_in_and_another_is_noted_apart() -> None:
    known = Learnt((carried(10.0, itl=0.03), carried(30.0, itl=0.06)), 2, NOW - 600)
    found = learnt(look({**WELL, **FAST}, known=known)).carried
    assert [one.load for one in found] == [10.0, 30.0]
    assert found[0].itl == pytest.approx(0.027)
    other = learnt(look({**WELL, **FAST, "running": 20.0, "fullest": 20.0}, known=known)).carried
    assert [one.load for one in other] == [10.0, 20.0, 30.0]


@pytest.mark.parametrize(
    ("points", "load", "binds"),
    [
        ([carried(10.0), carried(20.0, itl=0.04), carried(40.0, itl=0.08)], 20.0, "itl"),
        ([carried(10.0), carried(30.0, itl=0.06)], 20.0, "itl"),
        ([carried(10.0, ttft=0.1), carried(20.0, ttft=0.9)], 15.0, "ttft"),
        # What was not tried is trusted as far as the latencies leave room, and no further than so many times.
        ([carried(10.0, itl=0.032)], 12.5, "itl"),
        ([carried(10.0, itl=0.001)], 10.0 * UNTRIED, "itl"),
        # Late at a smaller load than one that was within: a queue from before that.
        ([carried(5.0, ttft=9.0), carried(20.0, ttft=0.1), carried(40.0, ttft=0.9)], 30.0, "ttft"),
        # Nothing but overload was seen. With a queue the time to the first token says nothing of the load.
        ([carried(64.0, ttft=90.0, itl=0.16, waiting=300.0)], 16.0, "itl"),
        ([carried(64.0, ttft=90.0, waiting=300.0)], 51.2, "ttft"),
        ([carried(64.0, ttft=5.0)], 6.4, "ttft"),
        ([carried(1.0, ttft=5.0)], 1.0, "ttft"),
        # Where a queue begins is not in proportion to how long it has become.
        ([carried(3.0, itl=0.01), carried(64.0, ttft=90.0, waiting=300.0, itl=0.01)], 6.0, "ttft"),
        ([carried(40.0, itl=0.01), carried(64.0, ttft=90.0, waiting=300.0, itl=0.01)], 51.2, "ttft"),
    ],
)
def test_the_load_at_which_a_goal_is_reached_and_which_goal_that_is(
    points: list[Carried], load: float, binds: str
) -> None:
    found = GOALS.capacity(points)
    assert (found.load, found.binds) == (pytest.approx(load), binds)
    least = points[0].load
    share = load if load >= least else (load * least) ** 0.5
    assert found.requests == pytest.approx(share / 5)
    assert found.tokens == pytest.approx(share * 40)
    assert GOALS.capacity([]) is None


def test_as_many_as_carry_what_arrives_and_the_decision_says_which_goal_binds() -> None:
    outcome = look({**WELL, **FAST, "requests": 14.0}, known=KNOWN)
    assert outcome.step.after == 4  # 14 / 4, rounded up
    assert "itl binds: each carries 4/s and 800 tokens/s with 20 requests" in outcome.step.text
    assert look({**WELL, **FAST, "requests": 3.0}, known=KNOWN).step.after == 1


def test_what_waits_counts_although_every_latency_that_was_measured_is_within() -> None:
    """Dynamo's issue 10528: those that wait are not served yet, and so in no latency."""
    calm = look({**WELL, **FAST, "requests": 3.0}, known=KNOWN)
    growing = {"waiting": series_of((NOW - at, max(0.0, 60.0 - at)) for at in range(1000, -1, -5))}
    outcome = look({**WELL, **FAST, "requests": 3.0, "waiting": 60.0}, known=KNOWN, past=growing)
    assert outcome.step.after > calm.step.after
    assert "90 wait then" in outcome.step.text


def test_what_came_lately_is_kept_ready_for_as_long_as_starts_take() -> None:
    burst = {
        "requests": series_of((NOW - at, 24.0 if 300 <= at <= 400 else 2.0) for at in range(1000, -1, -5))
    }
    quick = look({**WELL, **FAST, "requests": 2.0}, known=KNOWN, past=burst, startup=10.0)
    slow = look({**WELL, **FAST, "requests": 2.0}, known=KNOWN, past=burst, startup=120.0)
    assert (quick.step.after, slow.step.after) == (1, 6)
    rising = {"requests": series_of((NOW - at, max(2.0, 8.0 - at / 10)) for at in range(1000, -1, -5))}
    now = look({**WELL, **FAST, "requests": 8.0}, known=KNOWN, past=rising, startup=1.0)
    ahead = look({**WELL, **FAST, "requests": 8.0}, known=KNOWN, past=rising, startup=60.0)
    assert (now.step.after, ahead.step.after) == (2, 3)


def test_a_few_requests_that_came_faster_are_not_kept_ready_for() -> None:
    """Not more of them than the percentile leaves out."""
    short = {
        "requests": series_of((NOW - at, 24.0 if at in {50, 55} else 12.0) for at in range(1000, -1, -5))
    }
    assert look({**WELL, **FAST, "requests": 3.0}, known=KNOWN, past=short, startup=200.0).step.after == 3


def test_without_a_reading_it_holds_and_without_a_latency_it_only_adds() -> None:
    held = look({**WELL, **FAST, "running": None}, known=KNOWN)
    assert (held.vote, held.step.code) == (Vote.HOLD, Code.SIGNAL_MISSING)
    assert "goal.running is not available" in held.step.text
    untold = {**WELL, "ttft": None, "itl": 0.02}
    fewer = look({**untold, "requests": 3.0}, known=KNOWN)
    assert (fewer.vote, fewer.step.code) == (Vote.HOLD, Code.SIGNAL_MISSING)
    assert look({**untold, "requests": 14.0}, known=KNOWN).step.after == 4
    idle = {**untold, "running": 0.0, "fullest": 0.0, "requests": 0.0, "served": 0.0, "itl": None}
    assert look(idle, before=3, known=KNOWN).step.after == 1  # no traffic is no reason to stay


def test_silent_replicas_keep_it_from_scaling_in() -> None:
    shown = {f"goal.{name}": seen(value, f"goal.{name}") for name, value in {**WELL, **FAST}.items()}
    shown["goal.requests"] = replace(seen(0.1, "goal.requests"), silent_count=1)
    asked = inputs(before=3, ready=3, observations=shown, bursts={"goal": KNOWN})
    assert apply_rule(GOAL, asked).step.code is Code.SOURCES_SILENT


def test_without_replicas_nobody_tells_so_it_begins_with_one() -> None:
    assert look(dict.fromkeys(WELL), before=0, ready=0).step.after == 1


def test_its_signals_are_those_of_the_rule_unless_the_endpoint_has_one_of_that_name() -> None:
    own = Signal("goal.ttft", ReplicaSignal("mine"))
    spec = EndpointSpec(1, 9, ReplicaTemplate("llm"), (own,), (GOAL,))
    sources = {one.id: one.source for one in spec.measured}
    assert sources["goal.ttft"] == own.source
    assert sources["goal.itl"] == ReplicaSignal("llm:itl_p95_seconds")
    assert list(sources).count("goal.ttft") == 1


def test_what_it_knows_outlives_a_pause_and_a_stored_decision_comes_to_the_same() -> None:
    spec = EndpointSpec(1, 9, ReplicaTemplate("llm"), (), (GOAL,))
    shown = {f"goal.{name}": seen(value, f"goal.{name}") for name, value in {**WELL, **FAST}.items()}
    asked = inputs(before=2, ready=2, observations=shown, bursts={"goal": KNOWN})
    assert evaluate(replace(spec, paused=True), asked).bursts == {"goal": KNOWN}
    assert evaluate(replace(spec, rules=()), asked).bursts == {}
    result = evaluate(spec, asked)
    again = question_from_wire(question_to_wire(Question(spec, asked, result.memory)))
    assert again.inputs.bursts == {"goal": KNOWN}
    assert evaluate(again.spec, again.inputs).evaluation.steps == result.evaluation.steps


@pytest.mark.parametrize(
    ("kind", "field"),
    [(SloRule(), "ttft"), (SloRule(ttft=1.0, percentile=99.5), "percentile"), (SloRule(itl=1.0), "")],
)
def test_what_can_be_wrong_with_it(kind: SloRule, field: str) -> None:
    assert [name for name, _ in kind.problems(())] == ([field] if field else [])


def test_a_backtest_runs_it_with_the_time_in_the_queue_as_that_to_the_first_token() -> None:
    dice, at, requests = random.Random(7), 0.0, list[Request]()
    while at < 1800:
        at += dice.expovariate(4.0 if 600 < at < 1200 else 0.4)
        requests.append(Request(at, dice.uniform(4.0, 8.0)))
    spec = EndpointSpec(
        1, 16, ReplicaTemplate("llm", gpu_count=1), (), (Rule("goal", "", SloRule(ttft=2.0)),)
    )
    setting = Setting(slots=8, cold_start=lambda _: 20.0)
    report = run(replace(spec, tick=5.0), requests, setting, goal=2.0)
    fixed = run(replace(spec, min_replicas=report.most_replicas, rules=()), requests, setting, goal=2.0)
    assert report.violation_percent < 15
    assert report.gpu_hours < 0.8 * fixed.gpu_hours
