"""The usage ledger against the history of leases, over kills -9 in the middle of traffic and steps of the wall clock.

The history is kept by the database itself: a trigger notes when each lease was granted and ended, whatever else is written.
"""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from random import Random

from gpuscale.allocator.domain.accounting import millis
from gpuscale.allocator.domain.ledger import RETENTION
from tests.fault.allocator.reservation_traffic import Traffic
from tests.support.allocator_process import site
from tests.support.waiting import eventually

SEED = 1
KILLS = 6
HISTORY = f"""
CREATE TABLE history (id TEXT PRIMARY KEY, begun REAL, ended REAL, gpus TEXT);
CREATE TRIGGER lease_begun AFTER INSERT ON reservation BEGIN
    INSERT INTO history VALUES (NEW.id, NEW.deadline_seconds - NEW.ttl_seconds, NULL, NEW.gpus); END;
CREATE TRIGGER lease_ended AFTER UPDATE OF state ON reservation WHEN NEW.state <> 'active' BEGIN
    UPDATE history SET ended = NEW.deadline_seconds - {RETENTION} WHERE id = NEW.id; END;
CREATE TABLE checkpoint (id TEXT);
CREATE TRIGGER account_goes_on AFTER UPDATE ON usage WHEN NEW.outcome = '' BEGIN
    INSERT INTO checkpoint VALUES (NEW.reservation_id); END;
"""
SEEN = """
SELECT (SELECT count(*) FROM history WHERE ended IS NOT NULL),
    (SELECT count(DISTINCT reservation_id) FROM usage WHERE granted > 0),
    (SELECT count(*) FROM checkpoint)
"""


async def test_the_sum_is_what_the_leases_were_granted(tmp_path: Path) -> None:
    random, data = Random(SEED), tmp_path / "data"
    async with site(data, gpus=4, nodes=2) as place:
        place.launcher.look = 0.3
        life = await place.start()
        await life.kill()
        database = sqlite3.connect(data / "allocator.db")
        database.executescript(HISTORY)
        database.close()
        life = await place.start()
        traffic = Traffic(place.client, SEED)
        async with traffic.of(6):
            for nth in range(KILLS):
                await asyncio.sleep(random.uniform(0.5, 1.5))
                await life.kill()
                place.launcher.step_wall(random.choice((-3600, 0, 3600)) * (nth % 3))
                life = await place.start()
            with closing(sqlite3.connect(data / "allocator.db")) as database:

                def seen() -> tuple[int, int, int]:
                    [(ended, counted, checkpoints)] = database.execute(SEEN).fetchall()
                    return ended, counted, checkpoints

                before = seen()[2]
                await eventually(lambda: min(seen()[:2]) > 50 and seen()[2] > before, interval=0.1)
        await life.kill()
    with sqlite3.connect(data / "allocator.db") as database:
        history = database.execute("SELECT id, begun, ended, gpus FROM history").fetchall()
        used = {
            row[0]: row[1:]
            for row in database.execute(
                "SELECT reservation_id, sum(granted), max(outcome), max(until_ms) FROM usage GROUP BY 1"
            )
        }
        shares = dict(
            database.execute(
                "SELECT history.id, sum(value ->> 'milli') FROM history, json_each(gpus) GROUP BY 1"
            )
        )
    ended = [row for row in history if row[2] is not None]
    assert len(ended) > 50
    renewed_over_a_kill = 0
    for key, begun, end, _ in history:
        granted, outcome, until = used.get(key, (0, "", millis(begun)))
        assert granted == (millis(until / 1000 if end is None else end) - millis(begun)) * shares[key], key
        assert bool(outcome) == (end is not None)
        renewed_over_a_kill += granted > 0
    assert renewed_over_a_kill > 50
