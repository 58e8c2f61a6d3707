"""What the HPA, KEDA, Knative and Ray Serve document, as tables."""

import pytest

from tests.contract.autoscaler.conformance import UNKNOWN, Row, differing
from tests.support.asking_autoscaler import Asking

pytestmark = pytest.mark.asyncio(loop_scope="module")

TABLES = {
    "hpa": (
        {"slots": 10},
        [
            Row(4, 44, 4), Row(4, 44.1, 5), Row(4, 36, 4), Row(4, 35.9, 4), Row(4, 30, 3),
            Row(1, 90, 5, "RATE_LIMITED_UP"), Row(6, 500, 10, "CLAMPED_TO_MAX"),
            Row(4, UNKNOWN, 4, "SIGNAL_MISSING"),
        ],
    ),
    "keda": (
        {"min_replicas": 0},
        [
            Row(0, 0, 0), Row(0, 1, 1), Row(2, 40, 2), Row(2, 44, 2), Row(2, 45, 3), Row(3, 21, 2),
            Row(1, 0, 0), Row(2, UNKNOWN, 2, "SIGNAL_MISSING"),
        ],
    ),
    "knative": (
        {"slots": 100},
        [Row(2, 140, 2), Row(2, 141, 3), Row(4, 70, 2), Row(4, 0, 2), Row(2, 280, 4), Row(3, UNKNOWN, 3)],
    ),
    "ray_serve": ({}, [Row(2, 4, 2), Row(2, 5, 3), Row(2, 2, 1), Row(2, 0, 1), Row(2, UNKNOWN, 2)]),
}  # fmt: skip


@pytest.mark.parametrize("preset", TABLES)
async def test_as_documented(asked: Asking, preset: str) -> None:
    fields, rows = TABLES[preset]
    assert await differing(asked, await asked.render(preset, **fields), rows) == []
