"""Whatever numbers a policy holds and its signals show, an evaluation comes to a count, and that fits into a decision."""

import math

from hypothesis import given
from hypothesis import strategies as st

from gpuscale.autoscaler.domain.engine import Memory, Question, asked
from gpuscale.autoscaler.domain.inputs import LARGEST, Burst, Inputs, series_of
from gpuscale.autoscaler.domain.rules.formula import FormulaRule
from gpuscale.autoscaler.domain.rules.rule import BandRule, RatioRule, Rule, ThresholdRule
from gpuscale.autoscaler.domain.rules.targets import (
    DrainRule,
    ForecastModel,
    ForecastRule,
    PanicRule,
    TargetRule,
    TargetType,
)
from gpuscale.autoscaler.domain.signals import Sample, observe
from gpuscale.autoscaler.domain.spec import Combine, PushedSignal, Signal
from gpuscale.autoscaler.wire.decisions import evaluation_to_wire, question_to_wire
from tests.support.autoscaler_values import NOW, WALL, spec

SIGNALS = ("a", "b")
EDGES = (0.0, 5e-324, 1e-9, 1.0, 2.0**31, 2.0**53, 2.0**63, 1e300)
values = st.sampled_from((*EDGES, *(-one for one in EDGES), math.inf, math.nan)) | st.floats()
positive = st.sampled_from(EDGES[1:]) | st.floats(min_value=5e-324, allow_infinity=False)
share = st.sampled_from((5e-324, 0.5, 1.0))
kinds = st.one_of(
    st.builds(TargetRule, positive, st.sampled_from(TargetType)),
    st.builds(PanicRule, positive, share, max_up_rate=st.sampled_from((1.5, 1e6))),
    st.builds(
        DrainRule,
        st.sampled_from((1e-9, 86_400.0)),
        st.none() | st.sampled_from((1e-9, 86_400.0)),
        st.sampled_from((5e-324, 1e5)),
        share,
        busy_signal=st.just("a"),
        rate_signal=st.just("b"),
    ),
    st.builds(ForecastRule, positive, st.sampled_from(ForecastModel), st.sampled_from((1e-9, 86_400.0))),
    st.sampled_from([FormulaRule(text) for text in ("a / b", "a * b", "a ** b", "ceil(a - b)")]),
    st.builds(BandRule, st.just(0.0), positive, st.just(10_000), st.just(10_000)),
    st.builds(ThresholdRule, positive, step=st.just(10_000)),
    st.builds(RatioRule, positive, st.just(0.0), st.booleans(), st.booleans()),
)
pasts = st.lists(st.floats(-LARGEST, LARGEST), max_size=6)


@given(st.lists(kinds, min_size=1, max_size=3), st.data(), st.sampled_from(Combine), st.integers(0, 100_000))
def test_no_number_is_too_much(
    chosen: list[TargetRule], data: st.DataObject, how: Combine, before: int
) -> None:
    rules = [
        Rule(f"r{place}", data.draw(st.sampled_from(SIGNALS)), kind) for place, kind in enumerate(chosen)
    ]
    signals = [Signal(name, PushedSignal(name)) for name in SIGNALS]
    inputs = Inputs(
        before,
        data.draw(st.integers(0, before)),
        NOW,
        WALL,
        {one.id: observe(one, Sample((data.draw(values),), NOW), NOW) for one in signals},
        {
            name: series_of((NOW - 50 + 10 * at, one) for at, one in enumerate(data.draw(pasts)))
            for name in SIGNALS
        },
        bursts={"r0": Burst(NOW - 1.0, 10**9)},
        startup=data.draw(st.none() | st.just(30.0)),
    )
    spares = data.draw(st.integers(0, 2))
    wanted = spec(*rules, high=100_000, signals=signals, combine=how, warm_spares=spares)
    question = Question(wanted, inputs, Memory(0.0))
    evaluation = asked(question).evaluation
    assert 0 <= evaluation.wanted <= 100_000
    assert evaluation_to_wire(evaluation).wanted == evaluation.wanted
    assert question_to_wire(question).before == before
