"""The check of histories finds each planted bug, always, and accuses nobody else."""

from pathlib import Path

import pytest

from tests.fault.allocator.directed import SCHEDULES, Scribe
from tests.fault.allocator.planted_bugs import PLANTS
from tests.support.allocator_site import site


@pytest.mark.parametrize("plant", sorted(PLANTS))
async def test_a_planted_bug_is_found_in_one_run(plant: str, tmp_path: Path) -> None:
    """A check that finds nothing here would prove nothing in test_history.py."""
    schedule, found = SCHEDULES[plant]
    async with site(tmp_path / "data", gpus=4, nodes=2, plant=plant) as place:
        scribe = Scribe(place)
        await schedule(scribe)
    assert any(found in violation for violation in scribe.history.violations())


async def test_an_allocator_without_a_bug_passes_every_schedule(tmp_path: Path) -> None:
    async with site(tmp_path / "data", gpus=4, nodes=2) as place:
        for schedule, _ in SCHEDULES.values():
            scribe = Scribe(place)
            await schedule(scribe)
            assert scribe.history.violations() == []
