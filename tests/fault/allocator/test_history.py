"""A history check: clients, GPUs, and an allocator that is killed, paused and given another time; no promise may break.

That the check finds what it is to find is for test_reservation_history.py to prove.
GPUSCALE_CHAOS_KILLS sets how often it is killed (for a long run, several hundred); a few times otherwise.
"""

import asyncio
import os
import sqlite3
from contextlib import closing
from itertools import cycle
from pathlib import Path
from random import Random

import pytest

from gpuscale.allocator.domain.accounting import millis
from gpuscale.allocator.domain.ledger import RETENTION
from gpuscale.allocator.usecases.endings import TICK
from gpuscale.common.errors import ResourceExhaustedError
from tests.fault.allocator.reservation_history import History
from tests.fault.allocator.reservation_traffic import TTL, Traffic
from tests.support.allocator_process import START_DELAY, Site, site
from tests.support.waiting import eventually

SEED = 7
CLIENTS = 8
KILLS = int(os.environ.get("GPUSCALE_CHAOS_KILLS", "8"))
POINTS = (
    "allocator.reserve.before_commit",
    "allocator.store.before_commit",
    "allocator.store.after_commit",
    "allocator.end.before_commit",
    "allocator.change.before_commit",
    "allocator.reserve.before_reply",
)
TRIGGERS = f"""
CREATE TABLE history (id TEXT PRIMARY KEY, begun REAL, ended REAL, milli INTEGER, kept INTEGER DEFAULT 0);
CREATE TRIGGER lease_begun AFTER INSERT ON reservation BEGIN
    INSERT INTO history (id, begun, milli) SELECT NEW.id, NEW.deadline_seconds - NEW.ttl_seconds, sum(value ->> 'milli')
        FROM json_each(NEW.gpus); END;
CREATE TRIGGER lease_ended AFTER UPDATE OF state ON reservation WHEN NEW.state <> 'active' BEGIN
    UPDATE history SET ended = NEW.deadline_seconds - {RETENTION} WHERE id = NEW.id; END;
CREATE TRIGGER account_goes_on AFTER UPDATE ON usage WHEN NEW.outcome = '' BEGIN
    UPDATE history SET kept = kept + 1 WHERE id = NEW.reservation_id; END;
"""
"""When each lease was granted and ended, noted by the database itself, whatever else is written."""
ACCOUNTS = """
SELECT id, begun, ended, history.milli, kept, coalesce(sum(granted), 0), coalesce(max(outcome), ''), max(until_ms)
FROM history LEFT JOIN usage ON reservation_id = id GROUP BY id
"""
pytestmark = pytest.mark.timeout(360 + 20 * KILLS)


async def test_promises_hold_through_kills_pauses_and_steps_of_the_wall_clock(tmp_path: Path) -> None:
    """On PostgreSQL it is test_two_allocators.py that asks the same of the history.

    And the usage ledger adds up, to the millisecond, to what each lease was granted.
    """
    database = tmp_path / "data" / "allocator.db"
    async with site(database.parent, gpus=4, nodes=2) as place:
        await (await place.start()).kill()
        with closing(sqlite3.connect(database)) as opened:
            opened.executescript(TRIGGERS)
        place.launcher.look = 0.3
        history = await tormented(place, KILLS, Random(SEED))
        assert history.violations() == []
        # It runs out.
        await eventually(lambda: place.client.reserve(ttl=TTL), retry_on=(ResourceExhaustedError,))
        everything = await eventually(
            lambda: place.client.reserve(4, member_count=2), retry_on=(ResourceExhaustedError,)
        )
        assert len(everything.gpus) == 8
        await place.launcher.lives[-1].kill()
    with closing(sqlite3.connect(database)) as opened:
        accounts = opened.execute(ACCOUNTS).fetchall()
    for name, begun, end, milli, _, granted, outcome, until in accounts:
        until = until or millis(begun) if end is None else millis(end)
        assert granted == (until - millis(begun)) * milli, name
        assert bool(outcome) is (end is not None), name
    assert {row[6] for row in accounts} >= {"released", "expired"}
    assert any(row[4] for row in accounts), "an account that was written while its lease went on"


async def tormented(place: Site, kills: int, random: Random) -> History:
    """What clients saw of an allocator that had so many lives."""
    traffic = Traffic(place.client, SEED)
    async with asyncio.timeout(300 + 20 * kills), traffic.of(CLIENTS):
        await torment(place, kills, random, traffic.history)
        before = len(traffic.history.grants)
        await eventually(lambda: len(traffic.history.grants) > before + CLIENTS)
        await eventually(lambda: enough(traffic.history, kills))
    return traffic.history


def enough(history: History, kills: int) -> bool:
    """Whether enough has happened over so many kills to prove something."""
    return (
        len(history.grants) > 5 * kills
        and len(history.sightings) > 2 * kills
        and len(history.repetitions) > kills / 2
        and len(history.batches) > kills / 2
    )


async def torment(place: Site, kills: int, random: Random, history: History) -> None:
    """One life after the other, ended by a failpoint or at random, some paused before; the last one lives on.

    Now and then a life is long enough for leases to run out in it, and then the wall clock is stepped forward. Each is as
    long as it takes until enough has happened.
    """
    points = cycle(random.sample(POINTS, len(POINTS)))
    for kill in range(kills):
        life = await place.start(f"{next(points)}=kill" if kill % 2 else "")
        await asyncio.sleep(random.uniform(0.2, 0.6))
        if kill % 8 == 0:
            await asyncio.sleep(START_DELAY + TICK)
            place.launcher.step_wall(3600)
            await asyncio.sleep(3 * TICK)
        place.launcher.step_wall(random.choice([-3600, 0, 3600]))
        if random.random() < 0.3:
            await life.pause(0.7)
        await asyncio.sleep(random.uniform(0.1, 0.4))
        await eventually(lambda life=life, kills=kill + 1: not life.alive or enough(history, kills))
        await life.kill()
    place.launcher.step_wall(0)
    await place.start()
