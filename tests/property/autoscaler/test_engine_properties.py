"""P11, P12 and determinism, for any rules, observations, orders and bounds."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gpuscale.autoscaler.domain.decisions import Code, Stage
from gpuscale.autoscaler.domain.inputs import Observation, ObservationStatus, ReplicaWeights
from gpuscale.autoscaler.domain.rules.formula import FormulaRule
from gpuscale.autoscaler.domain.rules.rule import (
    BandRule,
    Comparator,
    Kind,
    RatioRule,
    Rule,
    StepRule,
    ThresholdRule,
)
from gpuscale.autoscaler.domain.rules.targets import TargetRule, TargetType
from gpuscale.autoscaler.domain.signals import QueueReading, QueueState
from gpuscale.autoscaler.domain.spec import EndpointSpec, Pace, ReplicaTemplate
from tests.support.autoscaler_values import NOW, evaluate, observe, observed, signal

SIGNALS = ("s0", "s1", "s2")
counts = st.integers(0, 40)
thresholds = st.sampled_from([-1.0, 0.0, 7.0, 70.0, 150.0]) | st.floats(-10, 200)
bound = st.sampled_from([None, None, None]) | counts
rarely = st.sampled_from([False, False, False, False, True])

sizes = st.sampled_from([-50, -4, -2, -1, 1, 30]) | st.integers(-50, 50).filter(bool)
steps = st.builds(StepRule, st.sampled_from(Comparator), thresholds, sizes)
high, low = st.floats(60, 200), st.floats(1, 50)
kinds = st.one_of(
    steps,
    st.builds(BandRule, low, high),
    st.builds(ThresholdRule, high, low),
    st.builds(RatioRule, high, low, st.booleans(), st.booleans()),
    st.builds(TargetRule, low, st.sampled_from(TargetType)),
    st.just(FormulaRule("ceil(s0 / 50)")),
)
rules = st.builds(
    Rule,
    id=st.sampled_from([f"r{n}" for n in range(8)]),
    signal=st.sampled_from(SIGNALS),
    kind=steps,
    disabled=rarely,
    priority=st.integers(-2, 2),
    cooldown=st.just(0.0) | st.none() | st.floats(0, 600),
    min_replicas=bound,
    max_replicas=bound,
)
rule_sets = st.lists(rules, max_size=3, unique_by=lambda one: one.id)


LESS = Rule("less", "s0", StepRule(Comparator.LESS_THAN, 1e9, -3), cooldown=0.0)
"""Asks for fewer whatever the signal shows, as rules that are drawn do seldom while no other asks for more."""


@st.composite
def specs(draw: st.DrawFn) -> EndpointSpec:
    low = draw(st.integers(0, 5))
    return EndpointSpec(
        low,
        low + draw(st.integers(1, 40)),
        ReplicaTemplate("worker"),
        signals=tuple(signal(name) for name in SIGNALS),
        rules=(*draw(rule_sets), *draw(st.sampled_from([(LESS,), ()]))),
        paused=draw(rarely),
    )


unknown = st.sampled_from([status for status in ObservationStatus if status is not ObservationStatus.OK])
numbers = st.none() | st.integers(-3, 300)
odd = st.none() | st.builds(
    QueueReading,
    st.sampled_from([QueueState.OK, QueueState.UNREACHABLE, QueueState.PENDING]),
    ready=numbers,
    unacked=numbers,
    observed_at=st.none() | st.floats(NOW - 30, NOW + 1),
)
amounts = st.sampled_from([0, 0, 3, 40, 100])
known = st.builds(
    QueueReading, st.just(QueueState.OK), ready=amounts, unacked=amounts, observed_at=st.just(NOW)
)
readings = rarely.flatmap(lambda unusual: odd if unusual else known)
"""Most can be read, and is on either side of most thresholds: else hardly any rule would ask for fewer."""


@st.composite
def observations(draw: st.DrawFn) -> dict[str, Observation]:
    return observed(*(observe(signal(name), draw(readings), NOW) for name in SIGNALS))


past = st.dictionaries(st.sampled_from([f"r{n}" for n in range(8)]), st.floats(NOW - 700, NOW))


@given(specs(), st.integers(0, 60), observations(), past, st.integers(0, 2))
def test_wanted_is_always_within_bounds_and_explained(
    spec: EndpointSpec, before: int, seen: dict[str, Observation], last: dict[str, float], unknown: int
) -> None:
    evaluation = evaluate(spec, before, seen, last, NOW, unknown)
    assert spec.min_replicas <= evaluation.wanted <= spec.max_replicas
    assert evaluation.steps[-1].stage is Stage.BOUNDS
    assert evaluation.steps[-1].after == evaluation.wanted
    chain = [step for step in evaluation.steps if step.stage is not Stage.RULE]
    assert chain[0].before == before
    assert all(step.text for step in evaluation.steps)


@given(specs(), st.data(), observations(), past)
def test_missing_data_never_lowers(
    spec: EndpointSpec, data: st.DataObject, seen: dict[str, Observation], last: dict[str, float]
) -> None:
    """Take away what any enabled rule reads, and the count stays or rises."""
    before = spec.max_replicas - data.draw(st.integers(0, spec.max_replicas - spec.min_replicas))
    read = sorted({one.signal for one in spec.rules if not one.disabled})
    if read:
        lost = data.draw(st.sampled_from(read))
        seen = seen | {lost: Observation(lost, data.draw(unknown), data.draw(st.none() | thresholds))}
    else:
        seen = {}
    assert evaluate(spec, before, seen, last, NOW).wanted >= before


@given(kinds, unknown, st.none() | thresholds, counts)
def test_a_rule_of_any_kind_holds_while_its_signal_is_unknown(
    kind: Kind, status: ObservationStatus, value: float | None, before: int
) -> None:
    rule = Rule("r", "" if isinstance(kind, FormulaRule) else "s0", kind, cooldown=0.0)
    spec = EndpointSpec(0, 40, ReplicaTemplate("w"), (signal("s0"),), (rule,), down=Pace(0.0))
    assert evaluate(spec, before, observed(Observation("s0", status, value)), {}, NOW).wanted == before


@given(specs(), st.data(), observations(), past)
def test_replicas_that_nobody_has_heard_of_never_lower(
    spec: EndpointSpec, data: st.DataObject, seen: dict[str, Observation], last: dict[str, float]
) -> None:
    before = spec.max_replicas - data.draw(st.integers(0, spec.max_replicas - spec.min_replicas))
    assert evaluate(spec, before, seen, last, NOW, 1).wanted >= before


few = st.integers(0, 2)
readable = st.builds(QueueReading, st.just(QueueState.OK), few, st.none() | few, st.none(), st.just(NOW))


@given(specs(), st.integers(1, 40), observations(), readable, past)
def test_zero_only_on_proof(
    spec: EndpointSpec, before: int, seen: dict[str, Observation], shown: QueueReading, last: dict[str, float]
) -> None:
    to_zero = Rule("down", "s0", StepRule(Comparator.LESS_THAN, 300.0, -50), cooldown=0.0)
    spec = replace(spec, min_replicas=0, rules=(to_zero,), paused=False)
    seen = seen | observed(observe(signal("s0"), shown, NOW))
    if evaluate(spec, before, seen, last, NOW).wanted == 0 and spec.max_replicas > 0:
        assert all(one.proven_empty for one in seen.values())


weights = st.lists(st.sampled_from([0.1, 0.3, 0.5, 0.75, 1.0, 1.5]), max_size=12).map(tuple)


@given(weights, weights.filter(bool), st.integers(0, 20))
def test_replicas_count_for_what_is_asked_and_none_is_there_for_nothing(
    there: tuple[float, ...], more: tuple[float, ...], units: int
) -> None:
    capacity = ReplicaWeights(there, more[0], 1.0)
    count = capacity.replicas(units)
    assert capacity.of(count) >= units
    assert count == 0 or capacity.of(count - 1) < units
    assert count <= capacity.replicas(units + 1)


@given(weights, weights.filter(bool), st.integers(0, 200), st.integers(1, 30))
def test_no_slow_replica_is_taken_for_a_whole_one(
    there: tuple[float, ...], more: tuple[float, ...], work: int, most: int
) -> None:
    """Ten of work for each: what is wanted does it all, as far as max lets it, and one fewer would not."""
    rule = Rule("t", "s0", TargetRule(10.0, tolerance_up=0.0, tolerance_down=0.0))
    spec = EndpointSpec(0, most, ReplicaTemplate("w"), (signal("s0"),), (rule,), down=Pace(0.0))
    seen = observed(Observation("s0", ObservationStatus.OK, float(work), 0.0, proven_empty=work == 0))
    capacity = ReplicaWeights(there, more[0], 1.0)
    count = evaluate(spec, len(there), seen, {}, NOW, capacity=capacity).wanted
    needed = -(-work // 10)
    assert count <= most
    assert count == most or capacity.of(count) >= needed
    assert count == 0 or capacity.of(count - 1) < needed


@given(specs(), st.integers(0, 40), observations(), past, st.integers(0, 2))
def test_replicas_of_weight_one_are_as_those_without_weights(
    spec: EndpointSpec, before: int, seen: dict[str, Observation], last: dict[str, float], unknown: int
) -> None:
    plain = evaluate(spec, before, seen, last, NOW, unknown)
    weighed = evaluate(
        spec, before, seen, last, NOW, unknown, capacity=ReplicaWeights((1.0,) * before, 1.0, 1.0)
    )
    steps = tuple(step for step in weighed.steps if step.code is not Code.WEIGHED)
    assert replace(weighed, steps=steps) == plain


@given(specs(), st.integers(0, 40), observations(), past, st.randoms(use_true_random=False))
def test_the_order_of_rules_does_not_matter(
    spec: EndpointSpec, before: int, seen: dict[str, Observation], last: dict[str, float], random: object
) -> None:
    shuffled: list[Rule] = list(spec.rules)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    other = EndpointSpec(
        spec.min_replicas, spec.max_replicas, spec.template, spec.signals, tuple(shuffled), paused=spec.paused
    )
    assert evaluate(other, before, seen, last, NOW) == evaluate(spec, before, seen, last, NOW)


@given(specs(), st.integers(0, 40), observations(), past)
def test_a_cooldown_starts_only_with_a_change(
    spec: EndpointSpec, before: int, seen: dict[str, Observation], last: dict[str, float]
) -> None:
    evaluation = evaluate(spec, before, seen, last, NOW)
    if evaluation.wanted == before:
        assert not evaluation.effective
    for name in evaluation.effective:
        step = next(one.kind.step for one in spec.rules if one.id == name)
        assert (step > 0) == (evaluation.wanted > before)
