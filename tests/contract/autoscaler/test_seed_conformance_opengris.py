"""OpenGRIS Scaler's policies as tables of tasks and workers: the same, and better on purpose."""

import pytest

from gpuscale.api.autoscaler import v1 as api
from tests.contract.autoscaler.conformance import UNKNOWN, Row, differing
from tests.support.asking_autoscaler import Asking

pytestmark = pytest.mark.asyncio(loop_scope="module")

ZERO = {"min_replicas": 0}
VANILLA = [
    Row(0, 0, 0), Row(0, 1, 1), Row(0, 500, 1), Row(5, 50, 5), Row(5, 50.001, 6), Row(5, 51, 6),
    Row(5, 500, 6), Row(5, 5, 5), Row(5, 4.999, 4), Row(5, 0, 4), Row(1, 0, 0),
    Row(10, 101, 10, "CLAMPED_TO_MAX"),
]  # fmt: skip
CAPABILITY = [
    Row(0, 0, 0), Row(0, 1, 1), Row(4, 20, 4), Row(4, 21, 5), Row(4, 2, 4), Row(4, 1.999, 3), Row(1, 0, 0),
    Row(10, 51, 10, "CLAMPED_TO_MAX"),
]  # fmt: skip
SAME = {
    "allocate=even_load; scaling=vanilla": ({}, VANILLA),
    "allocate=capability; scaling=vanilla": ({}, VANILLA),
    "allocate=capability; scaling=capability": ({}, CAPABILITY),
    "allocate=even_load; scaling=fixed_elastic": (
        {},
        [Row(1, 0, 1), Row(1, 10, 1), Row(1, 11, 2), Row(3, 0, 2), Row(3, 31, 4), Row(3, 3, 3), Row(3, 2, 2)],
    ),
    "allocate=even_load; scaling=no": ({}, [Row(3, {}, 3)]),
    "opengris_vanilla": (
        {"parameters": {"upper_task_ratio": 4, "lower_task_ratio": 2}},
        [Row(2, 8, 2), Row(2, 9, 3), Row(2, 4, 2), Row(2, 3, 1)],
    ),
    "opengris_capability": (
        {"parameters": {"lower_task_ratio": 4}},
        # Fewer would at once ask for more again, or leave work without a worker: both are kept.
        [Row(2, 7, 2), Row(2, 5, 1), Row(1, 3, 1), Row(1, 0, 0)],
    ),
}


@pytest.mark.parametrize("policy", SAME)
async def test_same_as_the_seed(asked: Asking, policy: str) -> None:
    fields, rows = SAME[policy]
    assert await differing(asked, await asked.render(policy, **ZERO, **fields), rows) == []


async def test_same_as_the_seed_the_tasks_of_a_set_of_capabilities_may_be_reported(asked: Asking) -> None:
    made = await asked.render(
        "allocate=capability; scaling=capability", watcher="", metric="tasks gpu,high_memory", min_replicas=1
    )
    assert await differing(asked, made, [Row(4, 20, 4), Row(4, 21, 5), Row(4, 1.9, 3), Row(1, 0, 1)]) == []


async def test_the_later_form_goes_down_in_proportion(asked: Asking) -> None:
    """As the original does today: max(1, ceil(tasks / 10)), and none without tasks."""
    made = await asked.render("opengris_vanilla", **ZERO)
    made.rules[0].ratio.proportional_down = True
    rows = [Row(10, 9, 1), Row(10, 10, 10), Row(5, 1, 1), Row(5, 0, 0), Row(5, 51, 6)]
    assert await differing(asked, made, rows) == []


REPORTED = [
    Row(1, 1, 1, "NOT_PROVEN_EMPTY"),
    Row(3, 1, 2),
    Row(2, 0.5, 1),
    Row(1, 0, 1, "NOT_PROVEN_EMPTY", proven=False),
    Row(1, 0, 0),
    Row(0, 1, 1),
    Row(0, 0, 0),
]


@pytest.mark.parametrize("policy", ["opengris_vanilla", "opengris_fixed_elastic"])
async def test_better_no_last_worker_goes_while_a_task_is_reported(asked: Asking, policy: str) -> None:
    fields: dict[str, object] = {"watcher": "", "metric": "tasks", "parameters": {"lower_task_ratio": 2}}
    if policy == "opengris_fixed_elastic":
        fields["parameters"] = {"lower_task_ratio": 2, "primary_worker_groups": 0}
    made = await asked.render(policy, **ZERO, **fields)
    assert await differing(asked, made, REPORTED) == []


BETTER = {
    "tasks that cannot be counted are not none": [
        Row(5, UNKNOWN, 5, "SIGNAL_MISSING"),
        Row(0, UNKNOWN, 0, "SIGNAL_MISSING"),
    ],
    "no worker goes while one may live that is not heard of": [Row(5, 4, 5, "REPLICAS_UNKNOWN", unknown=1)],
    "the last worker goes only where nothing is in hand for sure": [
        Row(1, 0, 1, "NOT_PROVEN_EMPTY", proven=False)
    ],
}


@pytest.mark.parametrize("table", BETTER)
@pytest.mark.parametrize("policy", ["vanilla", "capability"])
async def test_deliberately_better(asked: Asking, policy: str, table: str) -> None:
    rows = BETTER[table]
    if policy == "capability":
        rows = [
            Row(row.before, row.shows and 2, row.wanted, row.limit, unknown=row.unknown, proven=row.proven)
            for row in rows
        ]
    assert await differing(asked, await asked.render(f"scaling={policy}", **ZERO), rows) == []


@pytest.mark.parametrize("policy", ["vanilla", "capability", "fixed_elastic"])
async def test_same_as_the_seed_those_with_the_fewest_queued_tasks_go_and_of_them_the_first_started(
    asked: Asking, policy: str
) -> None:
    """What follows from it is in tests/unit/autoscaler/test_planning.py."""
    made = await asked.render(f"scaling={policy}")
    assert made.busy_metric == "queued_tasks"
    assert made.scale_in_order == api.ScaleInOrder.SCALE_IN_ORDER_OLDEST_FIRST


async def test_better_workers_on_their_way_up_count(asked: Asking) -> None:
    """The original asks for another at each heartbeat until the first has connected."""
    made = await asked.render("scaling=vanilla", **ZERO)
    request = api.EvaluateRequest(
        spec=made, before=2, ready_replicas=0, signals=[api.StatedSignal(signal="all", value=15)]
    )
    assert (await asked.evaluate(request)).decision.wanted == 2
