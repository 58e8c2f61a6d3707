"""The fleet's database: recordings and health events as JSON, and history in chunks of the coarsest tier.

Stored times are on a timeline that spans boots: seconds of the clock, which restarts with each boot, plus an offset that is
constant within a boot. The first run of a boot takes the offset from the wall clock, unless that is behind the newest stored
time. Writes replace rows and so can be repeated.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from sqlalchemy import Connection, Table, bindparam, delete, func, insert, select
from sqlalchemy.orm import registry
from sqlmodel import Field, SQLModel

from gpuscale.common.store.sqlite_store import Sqlite
from gpuscale.common.store.store import Store

STEP_SECONDS = 60.0
"""Offsets are multiples of this, the coarsest step of history, to keep buckets aligned."""


@dataclass(frozen=True, slots=True)
class BootTimeline:
    """The stored timeline during one boot: seconds of its clock plus `offset`."""

    boot_id: str
    offset: float

    def stored(self, at: float) -> float:
        """A time of the clock on the timeline."""
        return at + self.offset

    def clock(self, stored: float) -> float:
        """A stored time on the clock; negative before this boot."""
        return stored - self.offset


def continued(
    before: BootTimeline | None, newest: float, boot_id: str, now: float, wall: float
) -> BootTimeline:
    """The timeline of this boot, at `now` on its clock, given that of the last run and the newest stored time."""
    if before is not None and before.boot_id == boot_id:
        return before
    least = max(wall, newest + STEP_SECONDS) - now
    return BootTimeline(boot_id, (least // STEP_SECONDS) * STEP_SECONDS)


VERSION = 3
DATABASE = "fleet.db"

Chunk = tuple[str, int, bytes]
"""Key of a series, number of the chunk, and its rows."""


class _Table(SQLModel, registry=registry()):
    """Base of this file's tables, apart from those of other services in the process."""


class Recording(_Table, table=True):
    """A recording; `body` is from `saver`."""

    id: str = Field(primary_key=True)
    body: str


class HealthEvent(_Table, table=True):
    """A health event; `body` is from `saver`."""

    id: str = Field(primary_key=True)
    body: str


class HistoryChunk(_Table, table=True):
    """A chunk of a series in the coarsest tier; `body` is from `history.ring`."""

    key: str = Field(primary_key=True)
    number: int = Field(primary_key=True, index=True)
    body: bytes


class Boot(_Table, table=True):
    """The timeline of the last run, and its newest time."""

    id: int = Field(default=1, primary_key=True)
    boot_id: str
    offset_seconds: float
    newest_seconds: float


_RECORDING, _CHUNK, _BOOT, _EVENT = (
    _Table.metadata.tables[name] for name in ("recording", "historychunk", "boot", "healthevent")
)


def to_3(connection: Connection) -> None:
    """Drop what version 2 kept: history in steps of 10 s."""
    connection.exec_driver_sql("DROP TABLE IF EXISTS finerchunk")


@dataclass(frozen=True, slots=True)
class Saving:
    """What one write stores."""

    timeline: BootTimeline
    newest: float  # the current time on the timeline
    recordings: Mapping[str, str]  # bodies by id
    chunks: Sequence[Chunk]  # changed chunks of history
    kept: Sequence[str]  # ids of all recordings; others are deleted
    oldest_chunk: int  # chunks with a lower number are deleted
    events: Mapping[str, str]  # bodies of changed health events by id; empty for dropped ones


class FleetStore:
    """Reads and writes the file. Writes return once they are on disk. Raises as `common.store.store.Store`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @classmethod
    @asynccontextmanager
    async def open(cls, directory: Path) -> AsyncGenerator[Self]:
        """Open or create the file in a directory. Raises as `open_saver`."""
        # Version 1 lacks tables, which the store creates.
        file = Sqlite(directory / DATABASE, _Table.metadata, VERSION, {1: lambda _: None, 2: to_3})
        async with Store.open(file, name="fleet") as store:
            yield cls(store)

    async def boot(self) -> tuple[BootTimeline | None, float]:
        """The timeline of the last run and its newest time; None and 0 before the first run."""
        row = await self._store.read(lambda connection: connection.execute(select(_BOOT)).one_or_none())
        if row is None:
            return None, 0.0
        return BootTimeline(row.boot_id, row.offset_seconds), row.newest_seconds

    async def bodies(self, name: str) -> list[str]:
        """All bodies of the table `recording` or `healthevent`."""
        table = _Table.metadata.tables[name]
        bodies = select(table.c.body).order_by(table.c.id)
        return await self._store.read(lambda connection: list(connection.scalars(bodies)))

    async def series(self, numbers: range) -> list[tuple[str, bool]]:
        """The key of each series, in order, and whether it has chunks of these numbers."""
        inside = func.max(_CHUNK.c.number.between(numbers.start, numbers.stop - 1))
        found = select(_CHUNK.c.key, inside).group_by(_CHUNK.c.key).order_by(_CHUNK.c.key)
        rows = await self._store.read(lambda connection: connection.execute(found).all())
        return [(key, bool(has)) for key, has in rows]

    async def chunks(self, sizes: Mapping[str, int], numbers: range) -> dict[str, list[bytes]]:
        """Bodies of chunks of these numbers by series, the newest first, until they have the bytes that `sizes` asks for."""
        key, number = _CHUNK.c.key, _CHUNK.c.number
        which = (key == bindparam("of"), number.between(numbers.start, numbers.stop - 1))
        of_one = select(_CHUNK.c.body).where(*which).order_by(number.desc())

        def work(connection: Connection) -> dict[str, list[bytes]]:
            found = {key: list[bytes]() for key in sizes}
            for key, bodies in found.items():
                with connection.execute(of_one, {"of": key}) as rows:
                    read = 0
                    while read < sizes[key] and (row := rows.fetchone()):
                        bodies.append(row.body)
                        read += len(row.body)
            return found

        return await self._store.read(work)

    async def save(self, saving: Saving) -> None:
        """Write in one transaction."""
        boot = {
            "id": 1,
            "boot_id": saving.timeline.boot_id,
            "offset_seconds": saving.timeline.offset,
            "newest_seconds": saving.newest,
        }
        chunks = [{"key": key, "number": number, "body": body} for key, number, body in saving.chunks]
        gone = [{"gone": key} for key, body in saving.events.items() if not body]
        new: tuple[tuple[Table, list[dict[str, Any]]], ...] = (
            (_BOOT, [boot]),
            (_RECORDING, [{"id": key, "body": body} for key, body in saving.recordings.items()]),
            (_EVENT, [{"id": key, "body": body} for key, body in saving.events.items() if body]),
            (_CHUNK, chunks),
        )

        def work(connection: Connection) -> None:
            for table, rows in new:
                if rows:
                    connection.execute(insert(table).prefix_with("OR REPLACE"), rows)
            if gone:
                connection.execute(delete(_EVENT).where(_EVENT.c.id == bindparam("gone")), gone)
            connection.execute(delete(_RECORDING).where(_RECORDING.c.id.not_in(saving.kept)))
            connection.execute(delete(_CHUNK).where(_CHUNK.c.number < saving.oldest_chunk))

        await self._store.write(work, frees=not (saving.recordings or saving.chunks))
