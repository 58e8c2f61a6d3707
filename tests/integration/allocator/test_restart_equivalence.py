"""An allocator that is killed now and then says what one says that never was, whatever happened before."""

from pathlib import Path
from random import Random

import pytest

from gpuscale.allocator.usecases import endings as forgetting
from gpuscale.allocator.usecases import endings as losses
from gpuscale.allocator.usecases import endings as sweeper
from gpuscale.common.secrets import SecretUrl
from tests.integration.allocator.restart_play import Play, site
from tests.integration.allocator.restarted import line
from tests.support.clock import ManualClock
from tests.support.fake_fleet import FakeFleet
from tests.support.postgresql import PostgresServer

pytestmark = pytest.mark.usefixtures("lead_outlasts_stalls")

DEEDS = 18
"""Between two restarts."""


@pytest.fixture(autouse=True)
def looked_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """What looks at the clock in steps of real time does so often, since the clock of these tests stands still."""
    monkeypatch.setattr(sweeper, "START_DELAY", 0.02)
    monkeypatch.setattr(sweeper, "TICK", 0.02)
    monkeypatch.setattr(losses, "PERIOD", 0.02)
    monkeypatch.setattr(forgetting, "PERIOD", 0.02)


async def play(folder: Path, seed: int, restarts: int, database: SecretUrl | None = None) -> None:
    """Let much happen, with restarts of one of two and a reboot at the end."""
    clock = ManualClock()
    async with (
        line(folder / "kept", clock, FakeFleet(*site())) as kept,
        line(folder / "killed", clock, FakeFleet(*site()), database) as killed,
    ):
        play = Play(kept, killed, clock, Random(seed))
        for _ in range(restarts):
            for _ in range(DEEDS):
                await play.deed()
            await play.restart()
        await play.reboot()


async def test_a_restart_forgets_nothing_that_can_be_seen(tmp_path: Path) -> None:
    """With this seed there are, when it is killed, shares, gangs, drains, preempted, LOST and ended reservations, and quotas."""
    await play(tmp_path, 43, restarts=2)


async def test_another_term_forgets_nothing_that_can_be_seen(
    tmp_path: Path, postgresql: PostgresServer
) -> None:
    """Its state is in PostgreSQL, that of the one beside it in a file: all that they say is the same. A day passes."""
    await play(tmp_path, 86, restarts=2, database=postgresql.database())
