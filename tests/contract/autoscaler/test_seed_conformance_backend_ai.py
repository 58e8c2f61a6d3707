"""Backend.AI's rules (pull request 3277, and as they are today) as tables: the same, and better on purpose."""

from typing import Any

import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.common.wire import to_duration
from tests.contract.autoscaler.conformance import UNKNOWN, Row, differing
from tests.support.asking_autoscaler import Asking

pytestmark = pytest.mark.asyncio(loop_scope="module")

MORE, LESS = api.Comparator.COMPARATOR_GREATER_THAN, api.Comparator.COMPARATOR_LESS_THAN
MORE_OR_EQUAL = api.Comparator.COMPARATOR_GREATER_THAN_OR_EQUAL
LESS_OR_EQUAL = api.Comparator.COMPARATOR_LESS_THAN_OR_EQUAL


def rule(
    name: str, comparator: api.Comparator.ValueType, threshold: float, step: int, **fields: Any
) -> api.Rule:
    """A rule as the original has them: skipped at its bounds, and resting for 300 s."""
    made = api.Rule(
        id=name,
        signal="metric",
        step=api.StepRule(comparator=comparator, threshold=threshold, step=step),
        bound_mode=api.BoundMode.BOUND_MODE_SKIP,
        cooldown=to_duration(300),
    )
    made.MergeFrom(api.Rule(**fields))
    return made


def spec(*rules: api.Rule, low: int = 0, high: int = 10, **fields: Any) -> api.EndpointSpec:
    made = api.EndpointSpec(
        min_replicas=low,
        max_replicas=high,
        signals=[{"id": "metric", "queue": {"watcher": "watchers/jobs", "count": "QUEUE_COUNT_TOTAL"}}],
        rules=rules,
        combine=api.Combine.COMBINE_FIRST_MATCH,
        bound_mode=api.BoundMode.BOUND_MODE_SKIP,
        template=api.ReplicaTemplate(template="worker"),
    )
    made.MergeFrom(api.EndpointSpec(**fields))
    return made


def kernels(*rules: api.Rule) -> api.EndpointSpec:
    """A spec whose metric is the mean of what kernels report."""
    made = spec(*rules)
    made.signals[0].replicas.metric = "gpu_util"
    return made


SAME = {
    "> is strict": (spec(rule("r", MORE, 10, 1)), [Row(2, 10, 2), Row(2, 10.001, 3), Row(2, 9, 2)]),
    ">= is not": (spec(rule("r", MORE_OR_EQUAL, 10, 1)), [Row(2, 10, 3), Row(2, 9.999, 2)]),
    "< is strict": (spec(rule("r", LESS, 10, -1)), [Row(2, 10, 2), Row(2, 9.999, 1), Row(2, 11, 2)]),
    "<= is not": (spec(rule("r", LESS_OR_EQUAL, 10, -1)), [Row(2, 10, 1), Row(2, 10.001, 2)]),
    "thresholds are decimal": (spec(rule("r", MORE, 0.75, 1)), [Row(1, 0.75, 1), Row(1, 0.76, 2)]),
    "steps have a size and a sign": (
        spec(rule("up", MORE, 10, 3), rule("down", LESS, 1, -2)),
        [Row(4, 11, 7), Row(4, 0, 2), Row(4, 5, 4)],
    ),
    "a step down may add, if it says so": (spec(rule("r", LESS, 1, 1)), [Row(2, 0.5, 3)]),
    "a cooldown of 300 s is over at exactly 300 s": (
        spec(rule("r", MORE, 10, 1)),
        [
            Row(2, 11, 2, "COOLDOWN", rests={"r": 0.0}),
            Row(2, 11, 2, "COOLDOWN", rests={"r": 299.999}),
            Row(2, 11, 3, "", rests={"r": 300.0}),
            Row(2, 11, 3, ""),
        ],
    ),
    "a cooldown is that of its rule alone": (
        spec(rule("up", MORE, 10, 1), rule("more", MORE, 20, 2, priority=1)),
        [
            Row(2, 21, 4, rests={"up": 1.0}),
            Row(2, 11, 2, rests={"up": 1.0}),
            Row(2, 21, 3, rests={"more": 1.0}),
        ],
    ),
    "a step beyond the rule's bounds is skipped": (
        spec(rule("up", MORE, 10, 3, max_replicas=5), rule("down", LESS, 1, -3, min_replicas=2)),
        [Row(4, 11, 4, "SKIPPED"), Row(2, 11, 5), Row(4, 0, 4, "SKIPPED"), Row(5, 0, 2)],
    ),
    "so is one beyond the endpoint's": (
        spec(rule("up", MORE, 10, 3), rule("down", LESS, 1, -3), low=1, high=5),
        [Row(4, 11, 4, "SKIPPED_AT_MAX"), Row(2, 11, 5), Row(2, 0, 2, "SKIPPED_AT_MIN"), Row(4, 0, 1)],
    ),
    "one rule that is skipped makes room for the next": (
        spec(rule("a", MORE, 10, 3, max_replicas=5), rule("b", MORE, 10, 1)),
        [Row(4, 11, 5), Row(1, 11, 4)],
    ),
    "the first rule wins today, by priority, then id": (
        spec(rule("b", MORE, 10, 1), rule("c", MORE, 10, 4, priority=-1), rule("a", MORE, 20, 2)),
        [Row(2, 11, 6), Row(2, 21, 6)],
    ),
    "all rules added up, in the pull request": (
        spec(rule("a", MORE, 10, 1), rule("b", MORE, 20, 3), combine=api.Combine.COMBINE_SUM_STEPS),
        [Row(2, 11, 3), Row(2, 21, 6)],
    ),
    "a metric that is missing changes nothing": (spec(rule("r", LESS, 10, -1)), [Row(2, UNKNOWN, 2)]),
    "the mean is that of the kernels that report": (
        kernels(rule("r", MORE, 10, 1)),
        [Row(2, 11, 3), Row(2, 11, 3, silent=1), Row(2, 9, 2, silent=1)],
    ),
    "where no kernel reports nothing changes": (
        kernels(rule("up", MORE, 10, 1), rule("down", LESS, 5, -1)),
        [Row(2, UNKNOWN, 2, silent=2), Row(0, UNKNOWN, 0)],
    ),
    "a rule that is off changes nothing": (spec(rule("r", MORE, 10, 1, disabled=True)), [Row(2, 11, 2)]),
}
BETTER = {
    "a count below the min is repaired; the original skips it for ever": (
        spec(rule("r", MORE, 10, 1), low=3),
        [Row(1, 11, 3, "BELOW_MIN"), Row(1, 5, 3, "BELOW_MIN"), Row(1, UNKNOWN, 3, "BELOW_MIN")],
    ),
    "a step is clamped where nobody says otherwise; the original locks up": (
        spec(rule("r", MORE, 10, 3), high=5, bound_mode=api.BoundMode.BOUND_MODE_CLAMP),
        [Row(4, 11, 5, "CLAMPED_TO_MAX"), Row(5, 11, 5, "CLAMPED_TO_MAX")],
    ),
    "a metric that is missing is never idle; the original took it for 0": (
        spec(rule("r", LESS, 10, -1)),
        [Row(2, UNKNOWN, 2, "SIGNAL_MISSING"), Row(2, -1, 2, "SIGNAL_INVALID")],
    ),
    "a kernel that is silent may be busy; the original scales in on what the others say": (
        kernels(rule("r", LESS, 10, -1)),
        [Row(3, 5, 2), Row(3, 5, 3, "SOURCES_SILENT", silent=1), Row(3, 5, 3, "SOURCES_SILENT", silent=2)],
    ),
    "no replica that may live is counted as gone": (
        spec(rule("r", LESS, 10, -1)),
        [Row(3, 5, 3, "REPLICAS_UNKNOWN", unknown=1)],
    ),
    "an endpoint without replicas can grow; the original divides by them": (
        spec(rule("r", MORE, 10, 1)),
        [Row(0, 11, 1)],
    ),
    "it goes to zero only where no work is left for sure": (
        spec(rule("r", LESS, 10, -1)),
        [Row(1, 5, 1, "NOT_PROVEN_EMPTY"), Row(1, 0, 0), Row(1, 0, 1, "NOT_PROVEN_EMPTY", proven=False)],
    ),
}


@pytest.mark.parametrize("table", SAME)
async def test_same_as_the_seed(asked: Asking, table: str) -> None:
    assert await differing(asked, *SAME[table]) == []


@pytest.mark.parametrize("table", BETTER)
async def test_deliberately_better(asked: Asking, table: str) -> None:
    assert await differing(asked, *BETTER[table]) == []


async def test_the_preset_is_the_original_with_two_rules(asked: Asking) -> None:
    made = await asked.render("backend_ai", parameters={"scale_up_threshold": 10, "step_size": 2})
    rows = [
        Row(2, 10, 2),
        Row(2, 11, 4),
        Row(4, 0.5, 2),
        Row(4, 1, 4),
        Row(9, 11, 9, "SKIPPED_AT_MAX"),
        Row(2, 11, 2, "COOLDOWN", rests={"up": 299.0}),
    ]
    assert await differing(asked, made, rows) == []
