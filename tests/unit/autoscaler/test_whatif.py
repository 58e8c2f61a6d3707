"""What would be otherwise, when that may change, and how stated values are laid over live ones."""

import math
from collections.abc import Mapping
from typing import Any

import pytest

from gpuscale.autoscaler.domain.decisions import Code
from gpuscale.autoscaler.domain.engine import Memory, Question
from gpuscale.autoscaler.domain.inputs import ObservationStatus, series_of
from gpuscale.autoscaler.domain.rules.rule import Rule
from gpuscale.autoscaler.domain.rules.targets import DrainRule, TargetRule
from gpuscale.autoscaler.domain.spec import (
    Combine,
    EndpointSpec,
    OnMissing,
    Pace,
    QueueCount,
    RateLimit,
    ScalingMode,
)
from gpuscale.autoscaler.domain.whatif import (
    ALWAYS,
    Answer,
    Stated,
    StatedSignal,
    answer,
    hypothetical,
    question,
)
from tests.support.autoscaler_values import AT, NOW, down, inputs, seen, signal, spec, up


def asked(wanted: EndpointSpec, before: int, signals: Mapping[str, StatedSignal], **stated: Any) -> Question:
    return question(hypothetical(wanted, AT), wanted, Stated(signals, before, **stated))


def ask(wanted: EndpointSpec, before: int, value: float | None, **stated: Any) -> Answer:
    return answer(asked(wanted, before, {one.id: StatedSignal(value) for one in wanted.signals}, **stated))


def others(found: Answer) -> dict[Code, int]:
    return {one.code: one.wanted for one in found.alternatives}


OK = ObservationStatus.OK
TARGET = Rule("t", "queue", TargetRule(10.0))
JUST_GREW = {"memory": Memory(0.0, (), ((NOW - 20.0, 1),))}


@pytest.mark.parametrize(
    ("wanted", "before", "value", "expected"),
    [
        (spec(TARGET, high=3), 2, 90.0, {Code.CLAMPED_TO_MAX: 9}),
        (spec(TARGET, low=2, down=Pace(0.0)), 4, 10.0, {Code.CLAMPED_TO_MIN: 1}),
        (spec(TARGET, paused=True), 2, 50.0, {Code.PAUSED: 5}),
        (spec(TARGET, mode=ScalingMode.SHADOW), 2, 50.0, {Code.SHADOWED: 5}),
        (spec(TARGET, up=Pace(disabled=True)), 2, 50.0, {Code.DIRECTION_DISABLED: 5}),
        (spec(TARGET, up=Pace(limits=(RateLimit(60.0, replicas=1),))), 2, 50.0, {Code.RATE_LIMITED_UP: 5}),
        (spec(up(max_replicas=2, step=3)), 1, 50.0, {Code.CLAMPED_TO_RULE_MAX: 4}),
        (spec(TARGET, up(signal="other", comparison="> 1")), 2, 50.0, {}),
        (spec(TARGET, signals=[signal(activation_threshold=60.0)]), 0, 50.0, {Code.INACTIVE: 5}),
        (spec(down(comparison="< 5")), 1, 3.0, {Code.NOT_PROVEN_EMPTY: 0}),
        (spec(TARGET), 5, 50.0, {}),
    ],
)
def test_what_the_count_would_be_without_what_holds_it_back(
    wanted: EndpointSpec, before: int, value: float, expected: dict[Code, int]
) -> None:
    assert others(ask(wanted, before, value)) == expected


def test_a_signal_that_holds_is_told_with_what_would_come_without_it() -> None:
    wanted = spec(down("a"), down("b", signal="other"))
    found = answer(asked(wanted, 3, {"queue": StatedSignal(1.0), "other": StatedSignal()}))
    assert (found.result.evaluation.wanted, others(found)) == (3, {Code.SIGNAL_MISSING: 2})
    [one] = found.alternatives
    assert one.text == "rule b did not hold: other: it is given as missing"


def test_of_several_rules_that_hold_it_is_told_what_would_come_without_all_of_them() -> None:
    wanted = spec(down("a"), down("b", signal="other"), down("c", signal="third"))
    found = answer(asked(wanted, 3, {"queue": StatedSignal(1.0)}))
    assert [(one.code, one.text, one.wanted) for one in found.alternatives] == [
        (Code.HELD, "none of b, c held", 2)
    ]


def test_a_cooldown_is_told_by_its_name() -> None:
    [one] = ask(spec(up(cooldown=100.0)), 2, 50.0, last_changes={"up": NOW - 60.0}).alternatives
    assert (one.code, one.text) == (Code.COOLDOWN, "rule up had no cooldown")


def test_replicas_that_are_not_heard_of_are_told() -> None:
    assert others(ask(spec(down()), 3, 1.0, unknown=1)) == {Code.REPLICAS_UNKNOWN: 2}


@pytest.mark.parametrize(
    ("wanted", "before", "value", "stated", "wait", "count"),
    [
        (spec(up(cooldown=100.0)), 2, 50.0, {"last_changes": {"up": NOW - 60.0}}, 40.0, 3),
        (spec(up(cooldown=100.0)), 2, 50.0, {}, 100.0, 4),
        (spec(up(cooldown=0.0), tick=7.0), 2, 50.0, {}, 7.0, 4),
        (spec(TARGET, down=Pace(120.0)), 5, 20.0, {"memory": Memory(-math.inf, ((NOW - 50.0, 5),))}, 70.0, 2),
        (spec(TARGET, down=Pace(120.0)), 5, 20.0, {"memory": Memory(NOW - 30.0)}, 90.0, 2),
        (spec(TARGET, up=Pace(cooldown=60.0)), 2, 50.0, JUST_GREW, 40.0, 5),
        (spec(TARGET, up=Pace(limits=(RateLimit(60.0, replicas=1),))), 2, 50.0, JUST_GREW, 40.0, 3),
    ],
)
def test_when_the_count_may_change_next(
    wanted: EndpointSpec, before: int, value: float, stated: dict[str, object], wait: float, count: int
) -> None:
    found = ask(wanted, before, value, **stated).next_change
    assert (found.wait, found.wanted) == (pytest.approx(wait), count)


def test_nothing_may_change_where_nothing_waits() -> None:
    assert ask(spec(TARGET), 5, 50.0).next_change is None
    assert ask(spec(TARGET, high=3), 3, 50.0).next_change is None


@pytest.mark.parametrize(
    ("stated", "status"),
    [
        (StatedSignal(5.0), ObservationStatus.OK),
        (StatedSignal(5.0, age=15.0), ObservationStatus.OK),
        (StatedSignal(5.0, age=15.1), ObservationStatus.STALE),
        (StatedSignal(5.0, status=ObservationStatus.STALE), ObservationStatus.STALE),
        (StatedSignal(5.0, status=ObservationStatus.MISSING), ObservationStatus.MISSING),
        (StatedSignal(5.0, status=ObservationStatus.INVALID), ObservationStatus.INVALID),
        (StatedSignal(-5.0), ObservationStatus.INVALID),
        (StatedSignal(), ObservationStatus.MISSING),
    ],
)
def test_a_stated_value_is_judged_as_any_other(stated: StatedSignal, status: ObservationStatus) -> None:
    found = asked(spec(up()), 1, {"queue": stated})
    assert found.inputs.observations["queue"].status is status


def test_a_stated_signal_that_is_missing_is_what_the_signal_says_of_that() -> None:
    wanted = spec(up(), signals=[signal(on_missing=OnMissing.ZERO)])
    found = asked(wanted, 1, {"queue": StatedSignal()})
    assert found.inputs.observations["queue"].value == 0.0


def test_what_is_not_stated_is_live_and_what_is_not_live_is_missing() -> None:
    wanted = spec(up(), up("b", signal="other"), up("c", signal="third"))
    going_by = inputs(4, seen(7.0), seen(8.0, "other"), ready=3, last_changes={"up": 1.0})
    live = Question(wanted, going_by, Memory(5.0), 2)
    found = question(live, wanted, Stated({"other": StatedSignal(9.0)}))
    values = {name: one.value for name, one in found.inputs.observations.items()}
    assert values == {"queue": 7.0, "other": 9.0, "third": None}
    assert (found.inputs.before, found.inputs.ready, found.unknown_replicas) == (4, 3, 2)
    assert (found.memory.since, found.inputs.last_changes) == (5.0, {"up": 1.0})
    assert question(live, wanted, Stated(before=9)).inputs.ready == 9


def test_a_stated_value_has_always_been_there_unless_its_past_is_stated() -> None:
    """So a rule that needs a window can be asked about, and one can also state how it came to that."""
    wanted = spec(Rule("d", "queue", DrainRule(10.0, service_time=5.0, slots=1.0, utilization=1.0)))
    steady = answer(asked(wanted, 8, {"queue": StatedSignal(8.0)}))
    assert steady.result.evaluation.wanted == 8
    rising = StatedSignal(8.0, points=((60.0, 2.0), (30.0, 5.0)))
    found = asked(wanted, 2, {"queue": rising})
    assert found.inputs.series["queue"] == series_of([(NOW - 60, 2.0), (NOW - 30, 5.0), (NOW, 8.0)])


@pytest.mark.parametrize(
    ("shows", "empty"),
    [
        ({"total": StatedSignal(0.0)}, True),
        ({"total": StatedSignal(0.0, proven_empty=False)}, False),
        ({"total": StatedSignal(2.0)}, False),
        ({"ready": StatedSignal(0.0)}, False),
        ({"ready": StatedSignal(0.0), "unacked": StatedSignal(0.0)}, True),
        ({"ready": StatedSignal(0.0), "unacked": StatedSignal(1.0)}, False),
        ({"ready": StatedSignal(0.0, proven_empty=True)}, True),
    ],
)
def test_that_no_work_is_left_follows_from_what_is_stated(
    shows: dict[str, StatedSignal], empty: bool
) -> None:
    counts = {"total": QueueCount.TOTAL, "ready": QueueCount.READY, "unacked": QueueCount.UNACKED}
    wanted = spec(signals=[signal(name, count=counts[name]) for name in shows], combine=Combine.SAFEST)
    found = asked(wanted, 1, shows)
    assert all(one.proven_empty == empty for one in found.inputs.observations.values())


def test_another_spec_sees_the_signals_that_are_the_same() -> None:
    own = spec(up(), up("b", signal="other"))
    changed = spec(up(), up("b", signal="other"), signals=[signal(), signal("other", watcher="more")])
    live = Question(own, inputs(1, seen(1.0), seen(1.0, "other")), ALWAYS)
    found = question(live, changed, Stated()).inputs.observations
    assert {name: one.value for name, one in found.items()} == {"queue": 1.0, "other": None}


def test_without_an_endpoint_windows_are_full() -> None:
    assert hypothetical(spec(TARGET), AT).memory == ALWAYS
    assert ask(spec(TARGET, down=Pace(300.0)), 5, 20.0).result.evaluation.wanted == 2
