"""An endpoint over many evaluations, by rules of every kind: never beyond its bounds, and the same again from the record.

8,000 evaluations in all, with memory, cooldowns and bursts carried along, signals that come and go, and specs that change.
"""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain.decisions import DecisionOutcome, compose
from gpuscale.autoscaler.domain.engine import Memory, Question, asked
from gpuscale.autoscaler.domain.inputs import Inputs, Observation, ObservationStatus
from gpuscale.autoscaler.domain.rules import rule, targets
from gpuscale.autoscaler.domain.rules.formula import FormulaRule
from gpuscale.autoscaler.domain.signals import EndpointPast, Sample
from gpuscale.autoscaler.domain.spec import (
    Combine,
    EndpointSpec,
    GpuGate,
    OnMissing,
    Pace,
    RateLimit,
    ReplicaTemplate,
    ScalingMode,
    Signal,
)
from gpuscale.autoscaler.servicers.decision_servicer import verified
from gpuscale.autoscaler.wire.decisions import decision_body, question_from_wire, question_to_wire
from gpuscale.internal.autoscaler import v1 as autoscaler_internal
from tests.support.autoscaler_values import NOW, WALL, endpoint, signal

RUNS, STEPS = settings().max_examples * 4 // 5, 100
KINDS: tuple[rule.Kind, ...] = (
    rule.StepRule(rule.Comparator.GREATER_THAN, 20.0, 3),
    rule.StepRule(rule.Comparator.LESS_THAN_OR_EQUAL, 5.0, -2),
    rule.BandRule(5.0, 30.0, 2, 2),
    rule.RatioRule(guarded=True),
    rule.ThresholdRule(40.0, 0.0, 2),
    targets.TargetRule(7.0),
    targets.TargetRule(20.0, targets.TargetType.VALUE),
    targets.PanicRule(8.0),
    targets.DrainRule(5.0, 6.0, 4.0),
    targets.ScheduleRule((targets.Period(frozenset(), 0, 1439, 3),)),
    targets.ForecastRule(6.0),
    FormulaRule("ceil(a / 5) + 1"),
)
PACES = (
    Pace(),
    Pace(60.0, startups=10.0),
    Pace(30.0, (RateLimit(15.0, replicas=2), RateLimit(15.0, percent=50.0)), strictest=True),
    Pace(0.0, cooldown=45.0),
    Pace(disabled=True),
)


def some_spec(dice: random.Random) -> EndpointSpec:
    low = dice.choice((0, 0, 1, 3, 12))
    rules = tuple(
        rule.Rule(
            f"r{number}",
            "a" if not isinstance(kind, FormulaRule | targets.ScheduleRule) else "",
            kind,
            priority=dice.randrange(3),
            cooldown=dice.choice((None, 0.0, 20.0)),
            direction=dice.choice(list(rule.Direction)),
            max_replicas=dice.choice((None, 6)),
            bound_mode=dice.choice(list(rule.BoundMode)),
        )
        for number, kind in enumerate(dice.sample(KINDS, dice.randrange(1, 5)))
    )
    signals: tuple[Signal, ...] = (signal("a", on_missing=dice.choice(list(OnMissing)), window=30.0),)
    return EndpointSpec(
        low,
        low + dice.choice((0, 1, 8, 40)),
        ReplicaTemplate("worker", gpu_count=1),
        signals,
        rules,
        10.0,
        paused=dice.random() < 0.05,
        combine=dice.choice(list(Combine)),
        up=dice.choice(PACES),
        down=dice.choice(PACES),
        mode=dice.choice((ScalingMode.ACTIVE, ScalingMode.ACTIVE, ScalingMode.SHADOW)),
        bound_mode=dice.choice(list(rule.BoundMode)),
        warm_spares=dice.choice((0, 0, 2)),
        gpu_gate=dice.choice(list(GpuGate)),
    )


def some_sample(dice: random.Random, now: float) -> Sample:
    if dice.random() < 0.15:
        return Sample(problem="gone") if dice.random() < 0.5 else Sample((float("nan"),), now)
    value = float(dice.choice((0, 0, 3, 10, 25, 60, 400)))
    return Sample((value,), now - dice.choice((0.0, 1.0, 40.0)), proven_empty=value == 0)


class Life:
    """An endpoint, and all that goes with it from one evaluation to the next."""

    def __init__(self, dice: random.Random) -> None:
        self.dice, self.now, self.count = dice, NOW, 0
        self.past = EndpointPast(Memory(NOW))
        self.changes: dict[str, float] = {}
        self.spec = some_spec(dice)

    def question(self) -> Question:
        """What the next evaluation goes by."""
        dice = self.dice
        self.now += dice.choice((0.5, 10.0, 10.0, 90.0))
        if dice.random() < 0.02:
            self.spec = some_spec(dice)
        samples = {"a": some_sample(dice, self.now)}
        self.past = self.past.with_samples(self.spec, samples)
        inputs = Inputs(
            self.count,
            dice.randrange(self.count + 1),
            self.now,
            WALL,
            self.past.observations(self.spec, samples, self.now),
            self.past.series,
            dict(self.changes),
            self.past.bursts,
            dice.choice((None, 25.0)),
            dice.choice((None, self.count + dice.randrange(4))),
        )
        memory = self.past.memory or Memory(self.now)
        return Question(self.spec, inputs, memory, dice.choice((0, 0, 0, 1)))


@given(st.integers(0, 2**63))
@settings(max_examples=RUNS, deadline=None)
def test_the_count_is_never_beyond_its_bounds(seed: int) -> None:
    life = Life(random.Random(seed))
    for _ in range(STEPS):
        result = asked(life.question())
        wanted, spec = result.evaluation.wanted, life.spec
        assert spec.min_replicas <= wanted <= spec.max_replicas
        life.past = replace(life.past, memory=result.memory, bursts=result.bursts)
        life.changes |= dict.fromkeys(result.evaluation.effective, life.now)
        life.count = wanted


@given(st.integers(0, 2**63))
@settings(max_examples=40, deadline=None)
def test_a_decision_comes_to_the_same_from_what_is_stored_of_it(seed: int) -> None:
    """Bit for bit: every number that the engine went by survives the wire."""
    life = Life(random.Random(seed))
    for _ in range(10):
        question = life.question()
        wire = autoscaler_internal.DecisionInputs.FromString(question_to_wire(question).SerializeToString())
        assert repr(question_from_wire(wire)) == repr(question), "NaN is nowhere equal, but reads the same"
        result = asked(question)
        stored = decision_body(compose(endpoint(question.spec), result.evaluation, DecisionOutcome(0)))
        verdict = verified(stored, wire)
        assert verdict.equal, verdict.differences
        life.past = replace(life.past, memory=result.memory, bursts=result.bursts)
        life.count = result.evaluation.wanted


def test_a_decision_that_differs_says_in_what() -> None:
    """As it would after a rule of the engine was changed."""
    seen = Observation("a", ObservationStatus.OK, 50.0, 1.0)
    spec = EndpointSpec(
        0, 9, ReplicaTemplate("worker"), (signal("a"),), (rule.Rule("up", "a", KINDS[0], cooldown=0.0),)
    )
    question = Question(spec, Inputs(1, 1, NOW, WALL, {"a": seen}), Memory(0.0))
    stored = decision_body(compose(endpoint(spec), asked(question).evaluation, DecisionOutcome(0)))
    inputs = question_to_wire(question)
    assert verified(stored, inputs).equal
    stored.wanted = 5
    stored.steps[0].code = api.DecisionCode.DECISION_CODE_NOT_MET
    stored.steps.add(
        stage=api.DecisionStep.STAGE_ACT,
        code=api.DecisionCode.DECISION_CODE_START,
        text="done about it: not compared",
    )
    verdict = verified(stored, inputs)
    assert not verdict.equal
    assert verdict.differences[0] == "wanted was 5 and is 4"
    assert "NOT_MET" in verdict.differences[1]
    assert len(verdict.differences) == 2


LAGS = (0.0, 30.0, 120.0, 300.0)
TO_EIGHT = targets.TargetRule(8.0), targets.TargetRule(8.0, targets.TargetType.VALUE)
STEADY: tuple[rule.Kind, ...] = (*TO_EIGHT, targets.DrainRule(2.5, 6.0, 8.0))


@pytest.mark.parametrize("lag", LAGS)
@pytest.mark.parametrize(
    "kind", STEADY, ids=lambda kind: f"{type(kind).__name__}-{getattr(kind, 'type', '')}"
)
def test_a_constant_noisy_load_turns_the_count_at_most_once_a_window(kind: rule.Kind, lag: float) -> None:
    """Whatever replicas take to start: an hour at 60 pieces of work, give or take a fifth."""
    dice, window, tick = random.Random(f"{lag}"), 200.0, 5.0
    rules = (rule.Rule("r", "a", kind),)
    spec = EndpointSpec(1, 40, ReplicaTemplate("worker"), (signal("a"),), rules, tick, down=Pace(window))
    now, wanted, begun, turns, way = NOW, 1, [NOW - lag], list[float](), 0
    past = EndpointPast(Memory(now))
    while now < NOW + 3600:
        now += tick
        ready = max(1, sum(at + lag <= now for at in begun))
        load = 60.0 * dice.uniform(0.8, 1.2)
        level = load / ready if getattr(kind, "type", None) is targets.TargetType.VALUE else load
        samples = {"a": Sample((level,), now)}
        past = past.with_samples(spec, samples)
        seen = past.observations(spec, samples, now)
        memory = past.memory or Memory(now)
        result = asked(Question(spec, Inputs(wanted, ready, now, WALL, seen, past.series), memory))
        past = replace(past, memory=result.memory)
        change = result.evaluation.wanted - wanted
        wanted = result.evaluation.wanted
        begun = [*begun, *[now] * change] if change > 0 else begun[:wanted]
        if change and way * change < 0:
            turns.append(now)
        way = change or way
    assert all(later - earlier >= window for earlier, later in pairwise(turns)), turns
    assert 6 <= wanted <= 14
