"""Stored states of an allocator that a test damages, with what they hold."""

import shutil
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from gpuscale.allocator.app import DATABASE
from gpuscale.allocator.domain.cordons import Cordon, Spot
from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.model import Reservation, State
from gpuscale.allocator.queueing.model import Quota
from gpuscale.allocator.state.operators import CordonStore, QuotaStore
from gpuscale.allocator.state.store import AllocatorStore, open_store
from tests.support.allocator_values import NOW, WALL, order, reserved

BOOT = "boot"
WAL, WITNESS = f"{DATABASE}-wal", f"{DATABASE}-witness"
PAGE = 4096
RENEWED = NOW + 7200


@dataclass(frozen=True)
class Known:
    reservations: tuple[tuple[Reservation, str], ...]
    fence: int
    ranks: Mapping[str, int]
    quotas: tuple[Quota, ...]
    cordons: tuple[Cordon, ...]


async def known(data_dir: Path) -> Known:
    """What the allocator makes of a state, once every lease in it has been renewed. Raises GpuscaleError: it refuses it."""
    async with open_store(data_dir / DATABASE, BOOT) as store:
        live = [one for one, _ in (await store.load()).reservations if one.live]
        await store.save([], [replace(one, deadline=RENEWED) for one in live])
        saved = await store.load()
        return Known(
            tuple(saved.reservations),
            saved.fence,
            saved.ranks,
            tuple(await QuotaStore(store).load()),
            tuple((await CordonStore(store, BOOT).load(NOW))[0]),
        )


class States:
    """Copies of one state: as a kill leaves it, with much in the log, or closed in good order."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    async def make(self) -> Known:
        """Make the state, an earlier log of it, and the log of another one; what the state holds."""
        await self._write(self._folder / "other", first=1000, count=70)
        await self._write(self._folder / "live", first=0, count=20)
        shutil.copytree(self._folder / "live-killed", self._folder / "to-close")
        held = await known(self._folder / "to-close")
        shutil.move(self._folder / "to-close", self._folder / "live-closed")
        return held

    def copy(self, *, killed: bool) -> Path:
        """A copy that may be damaged."""
        self._count += 1
        target = self._folder / f"copy-{self._count}"
        shutil.copytree(self._folder / ("live-killed" if killed else "live-closed"), target)
        return target

    def log(self, name: str) -> Path:
        """The log of another state (`other-early`), or an earlier one of this (`live-early`)."""
        return self._folder / name / WAL

    async def _write(self, data_dir: Path, first: int, count: int) -> None:
        """Two lives: the first is closed in good order, the second is as if it was killed at its end."""
        ledger = Ledger(first)
        async with open_store(data_dir / DATABASE, BOOT) as store:
            await store.save_ranks({"n0": 0, "n1": 1})
            await grants(store, ledger, count, ended=10)
            self._keep(data_dir, "early")
        async with open_store(data_dir / DATABASE, BOOT) as store:
            await QuotaStore(store).save(Quota("ann", 8000, 2.0))
            await CordonStore(store, BOOT).save([Cordon(Spot("n1"), "fans", "bob", WALL, NOW + 600, 600.0)])
            await grants(store, ledger, 20, ended=5)
            await store.forget([], ledger.fence)
            await grants(store, ledger, 3, ended=0)
            self._keep(data_dir, "killed")

    def _keep(self, data_dir: Path, name: str) -> None:
        target = data_dir.with_name(f"{data_dir.name}-{name}")
        target.mkdir()
        for file in (DATABASE, WAL, WITNESS):
            shutil.copy(data_dir / file, target)


async def grants(store: AllocatorStore, ledger: Ledger, count: int, *, ended: int) -> None:
    """Write so many grants, one by one, and the end of the first of them."""
    granted = []
    for index in range(count):
        number = ledger.fence + 1
        wish = replace(order(), labels={"team": f"team {index}"}, tenant="ann")
        one = ledger.grant(wish, [reserved(f"GPU-{number}", index=index)], now=NOW, wall=WALL)
        granted.append(ledger.confirm(one))
        await store.save([granted[-1]], [])
    for one in granted[:ended]:
        await store.save([], [ledger.close(one, State.RELEASED, now=NOW + 5, wall=WALL)])


Damage = Callable[[Path, States, Random], None]


def changed(file: str, change: Callable[[bytearray, Random], None]) -> Damage:
    """A file has other content: what `change` makes of it."""

    def damage(data_dir: Path, states: States, random: Random) -> None:
        content = bytearray((data_dir / file).read_bytes())
        change(content, random)
        (data_dir / file).write_bytes(content)

    return damage


def flip(content: bytearray, random: Random) -> None:
    """A bit is another one."""
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)


def scramble(content: bytearray, random: Random) -> None:
    """Some bytes in a row are others."""
    at = random.randrange(len(content))
    length = min(random.choice([2, 16, 512]), len(content) - at)
    content[at : at + length] = random.randbytes(length)


def cut(content: bytearray, random: Random) -> None:
    size = len(content)
    del content[random.choice([0, random.randrange(size), max(0, size - random.randrange(1, 600))]) :]


def blank(content: bytearray, random: Random) -> None:
    at = random.randrange(len(content) // PAGE) * PAGE
    content[at : at + PAGE] = bytes(len(content[at : at + PAGE]))


def other_log(name: str) -> Damage:
    def damage(data_dir: Path, states: States, random: Random) -> None:
        shutil.copy(states.log(name), data_dir / WAL)

    return damage


def gone(file: str) -> Damage:
    def damage(data_dir: Path, states: States, random: Random) -> None:
        (data_dir / file).unlink()

    return damage


def torn_tail(data_dir: Path, states: States, random: Random) -> None:
    """A write that nobody was answered was cut short: harmless."""
    with (data_dir / WAL).open("ab") as opened:
        opened.write(random.randbytes(random.randrange(1, 2 * PAGE)))


def other_version(data_dir: Path, states: States, random: Random) -> None:
    """The file says that it is of another version."""
    with closing(sqlite3.connect(data_dir / DATABASE)) as connection:
        connection.execute(f"PRAGMA user_version = {random.choice([0, 1, 2, 3, 99])}")


def beside_index(index: str, believes: str, before: str, after: str) -> str:
    """A script that changes rows, `after` which an index lacks some or has too many: meanwhile it believes to be of others."""
    begin = "PRAGMA writable_schema = ON; UPDATE sqlite_master SET sql ="
    end = f" WHERE name = '{index}'; PRAGMA writable_schema = RESET"
    wrong = f"{begin} substr(sql, 1, instr(sql || ' WHERE', ' WHERE')) || 'WHERE {believes}'{end}"
    kept = f"CREATE TEMP TABLE kept AS SELECT sql FROM sqlite_master WHERE name = '{index}'"
    return f"{kept}; {before}; {wrong}; {after}; {begin} (SELECT sql FROM kept){end}"


def again(table: str, key: str) -> tuple[str, str]:
    """Take a row away, and put it back."""
    one = f"FROM {table} WHERE {key} = (SELECT max({key}) FROM {table})"
    return f"CREATE TEMP TABLE one AS SELECT * {one}; DELETE {one}", f"INSERT INTO {table} SELECT * FROM one"


HIDDEN = "PRAGMA ignore_check_constraints = ON; UPDATE reservation SET archived = 1 WHERE fence = 30"
CHANGED_ROWS = (
    "UPDATE reservation SET deadline_seconds = deadline_seconds + 1 WHERE fence = 21",
    "UPDATE reservation SET gpus = replace(gpus, 'GPU-30', 'GPU-31') WHERE fence = 30",
    "UPDATE reservation SET state = 'expired' WHERE fence = 1",
    "UPDATE reservation SET state = 'released'",
    "UPDATE reservation SET owner = 'eve' WHERE fence = 30",
    "UPDATE reservation SET fence = 500 WHERE fence = 30",
    "UPDATE reservation SET archived = 1 WHERE state = 'released'",
    HIDDEN,
    "DELETE FROM reservation",
    "DELETE FROM reservation WHERE state = 'released'",
    "DELETE FROM hold; DELETE FROM reservation WHERE state = 'active'",
    "DELETE FROM hold",
    "UPDATE hold SET gpu_uuid = gpu_uuid || 'x'",
    "UPDATE hold SET milli = 1",
    "INSERT INTO hold SELECT 'GPU-x', id, 1000 FROM reservation WHERE state = 'active' LIMIT 1",
    "UPDATE counter SET value = value - 1",
    "DELETE FROM counter WHERE name = 'rows'",
    "UPDATE rank SET rank = rank + 5",
    "UPDATE quota SET gpu_milli_limit = NULL",
    "UPDATE cordon SET node = 'n0'",
    # Rows that an index lacks, or has in vain.
    beside_index("ix_hold_reservation_id", "milli > 1000", *again("hold", "gpu_uuid")),
    beside_index("one_whole_hold", "milli > 1000", *again("hold", "gpu_uuid")),
    beside_index("ix_reservation_id", "archived > 1", *again("reservation", "fence")),
    beside_index("reservation_kept", "archived > 1", *again("reservation", "fence")),
    beside_index("reservation_kept", "archived < 2", *HIDDEN.split("; ")),
)


def changed_rows(script: str) -> Damage:
    """Rows are others or gone, and everything else is in order."""

    def damage(data_dir: Path, states: States, random: Random) -> None:
        with closing(sqlite3.connect(data_dir / DATABASE)) as connection, connection:
            connection.executescript(script)

    return damage


DAMAGES: Mapping[str, tuple[int, bool, Damage]] = {
    "a bit of the database": (20, False, changed(DATABASE, flip)),
    "bytes of the database": (10, False, changed(DATABASE, scramble)),
    "a bit of the database below a log": (5, True, changed(DATABASE, flip)),
    "a bit of the log": (15, True, changed(WAL, flip)),
    "bytes of the log": (5, True, changed(WAL, scramble)),
    "the database cut": (6, False, changed(DATABASE, cut)),
    "the log cut": (7, True, changed(WAL, cut)),
    "a page of the database": (6, False, changed(DATABASE, blank)),
    "a page of the log": (5, True, changed(WAL, blank)),
    "the log of another state": (3, True, other_log("other-early")),
    "the log of another state on a closed one": (2, False, other_log("other-early")),
    "an earlier log": (3, True, other_log("live-early")),
    "the log gone": (1, True, gone(WAL)),
    "the database gone": (2, False, gone(DATABASE)),
    "the database gone below a log": (1, True, gone(DATABASE)),
    "a torn tail": (6, True, torn_tail),
    "another version": (4, False, other_version),
    **{script: (1, False, changed_rows(script)) for script in CHANGED_ROWS},
    "the witness": (3, True, changed(WITNESS, flip)),
    "the witness cut": (2, True, changed(WITNESS, cut)),
}
"""How often in a round, on a state as a kill left it or closed, and what: more than a hundred in all."""
