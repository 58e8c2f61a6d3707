"""DistributedFunSearch's scaling, by its `ScalingConfig`, as tables: the same, and better on purpose."""

import pytest

from gpuscale.common.wire import seconds
from tests.contract.autoscaler.conformance import UNKNOWN, Row, differing
from tests.support.asking_autoscaler import Asking

pytestmark = pytest.mark.asyncio(loop_scope="module")

GIB = float(1 << 30)


def sampler(waiting: float | None, memory: float | None = 64.0) -> dict[str, float | None]:
    return {"waiting": waiting, "memory": None if memory is None else memory * GIB}


def evaluator(
    waiting: float | None, cpu: float | None = 50.0, load: float | None = 0.5
) -> dict[str, float | None]:
    return {"waiting": waiting, "cpu": cpu, "load": load}


SAMPLERS = [
    Row(1, sampler(50), 1), Row(1, sampler(51), 2), Row(1, sampler(5000), 2), Row(3, sampler(1), 3),
    Row(3, sampler(0), 2), Row(1, sampler(0), 1), Row(10, sampler(51), 10, "CLAMPED_TO_MAX"),
    Row(1, sampler(51, 30), 2), Row(1, sampler(51, 29.999), 1), Row(3, sampler(0, 0), 2),
]  # fmt: skip
EVALUATORS = [
    Row(1, evaluator(10), 1), Row(1, evaluator(11), 2), Row(3, evaluator(0), 2),
    Row(1, evaluator(11, cpu=99), 1), Row(1, evaluator(11, cpu=98.99), 2),
    Row(1, evaluator(11, load=0.99), 1), Row(1, evaluator(11, load=0.98), 2),
    Row(3, evaluator(0, cpu=100, load=9), 2), Row(1, evaluator(0), 1),
]  # fmt: skip
CONFIG = {
    "sampler_scale_up_threshold": 5, "evaluator_scale_up_threshold": 2, "min_gpu_memory_gib": 40,
    "max_gpu_utilization": 30, "min_system_memory_gib": 8, "cpu_usage_threshold": 80,
    "normalized_load_threshold": 0.5, "check_interval": 60, "max_samplers": 3, "max_evaluators": 2,
}  # fmt: skip
"""A whole `ScalingConfig`: each role takes its own part of it."""


async def test_same_as_the_seed_samplers(asked: Asking) -> None:
    made = await asked.render("distributedfunsearch")
    assert seconds(made.tick) == 120
    assert await differing(asked, made, SAMPLERS) == []


async def test_same_as_the_seed_evaluators(asked: Asking) -> None:
    assert await differing(asked, await asked.render("distributedfunsearch_evaluators"), EVALUATORS) == []


async def test_same_as_the_seed_by_its_own_configuration(asked: Asking) -> None:
    samplers = await asked.render("distributedfunsearch", parameters=CONFIG)
    shown = (1, (5, 8), 1), (1, (6, 8), 2), (1, (6, 7.9), 1), (3, (6,), 3)
    rows = [Row(before, sampler(*values), wanted) for before, values, wanted in shown]
    assert await differing(asked, samplers, rows) == []
    assert (samplers.max_replicas, seconds(samplers.tick)) == (3, 60)
    evaluators = await asked.render("distributedfunsearch_evaluators", parameters=CONFIG)
    rows = [
        Row(1, evaluator(2, 79, 0.4), 1),
        Row(1, evaluator(3, 79, 0.4), 2),
        Row(1, evaluator(3, 80, 0.4), 1),
        Row(1, evaluator(3, 79, 0.5), 1),
        Row(2, evaluator(3, 79, 0.4), 2),
    ]
    assert await differing(asked, evaluators, rows) == []


async def test_same_as_the_seed_a_sampler_wants_a_gpu_with_room(asked: Asking) -> None:
    template = {"template": "sampler", "gpu_count": 1}
    made = await asked.render("distributedfunsearch", template=template)
    assert made.template.min_memory_bytes == 20 << 30
    assert made.template.max_utilization_percent == 50
    own = await asked.render("distributedfunsearch", template=template, parameters=CONFIG)
    assert (own.template.min_memory_bytes, own.template.max_utilization_percent) == (40 << 30, 30)


async def test_same_as_the_seed_no_sampler_is_wanted_without_a_gpu(asked: Asking) -> None:
    made = await asked.render("distributedfunsearch", template={"template": "sampler", "gpu_count": 1})
    rows = [
        Row(2, sampler(500), 2, "CAPPED_BY_GPUS", gpu_limit=2),
        Row(2, sampler(500), 3, gpu_limit=3),
        Row(2, sampler(500), 2, "GPUS_UNKNOWN"),
        Row(2, sampler(0), 1, gpu_limit=2),
        Row(1, sampler(50), 1, gpu_limit=9),
    ]
    assert await differing(asked, made, rows) == []
    without = await asked.render("distributedfunsearch")
    assert await differing(asked, without, [Row(2, sampler(500), 3)]) == []


async def test_same_as_the_seed_switched_off_nothing_changes(asked: Asking) -> None:
    made = await asked.render("distributedfunsearch", parameters={"enabled": 0})
    rows = [Row(2, sampler(500), 2, "PAUSED"), Row(2, sampler(0), 2, "PAUSED")]
    assert await differing(asked, made, rows) == []


BETTER = [
    # A broker that is lost says nothing; the original reads 0 and stops processes that are at work.
    ("distributedfunsearch", Row(3, sampler(UNKNOWN), 3, "SIGNAL_MISSING")),
    ("distributedfunsearch_evaluators", Row(3, evaluator(UNKNOWN), 3, "SIGNAL_MISSING")),
    # A host that says nothing has no room, and stops nobody from leaving.
    ("distributedfunsearch", Row(1, sampler(51, UNKNOWN), 1)),
    ("distributedfunsearch_evaluators", Row(1, evaluator(11, cpu=UNKNOWN), 1)),
    ("distributedfunsearch", Row(3, sampler(0, UNKNOWN), 2)),
    # Nothing goes while a process may live that nobody hears of.
    ("distributedfunsearch", Row(3, sampler(0), 3, "REPLICAS_UNKNOWN", unknown=1)),
]


@pytest.mark.parametrize("preset", ["distributedfunsearch", "distributedfunsearch_evaluators"])
async def test_deliberately_better(asked: Asking, preset: str) -> None:
    rows = [row for name, row in BETTER if name == preset]
    assert await differing(asked, await asked.render(preset), rows) == []
