"""Archive: reservations that ended leave memory for a table of their own, and leave the disk when there are too many.

Memory keeps what ended last; older records are read where somebody asks for them, or repeats their request. No start reads
the table: a row is checked when it is read, and one that is not as it was written is refused. It is bounded by time, by
number and by bytes; records whose time is over first go first.
"""

import asyncio
import json
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NoReturn

from sqlalchemy import ColumnElement, Connection, Text, and_, cast, delete, func, insert, or_, select

from gpuscale.allocator.domain.ledger import RETENTION, Ledger, rebased
from gpuscale.allocator.domain.model import Reservation, State
from gpuscale.allocator.state import schema
from gpuscale.allocator.state.integrity import as_sealed, is_whole
from gpuscale.allocator.state.store import AllocatorStore, count, from_row, note_forgotten
from gpuscale.common.errors import FailedPreconditionError, UnavailableError
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import Clock
from gpuscale.common.store.sqlite_store import give_back
from gpuscale.common.wire import ANY_TIME, TimeRange

ROW_BYTES = 200
"""What a row takes on disk beside its texts: numbers, and its places in five indexes."""

_TABLES = schema.Table.metadata.tables
_RESERVATION = _TABLES["reservation"]
_ENDED = _TABLES["ended"]
_NAMES = [column.name for column in _ENDED.columns]
_TEXTS = (
    "id",
    "request_id",
    "fingerprint",
    "holder",
    "owner",
    "labels",
    "policy",
    "gpus",
    "tenant",
    "end_reason",
)
_SEALED = [as_sealed(column) for column in _ENDED.columns]


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """Which reservations a reader wants: of a holder, with a GPU or an instance of it, of a time; all if nothing is said."""

    holder: str = ""
    gpu_uuid: str = ""
    period: TimeRange = ANY_TIME

    def __contains__(self, one: Reservation) -> bool:
        """Whether a reservation is one of them."""
        return (
            self.holder in {"", one.holder}
            and (not self.gpu_uuid or any(self.gpu_uuid in {gpu.uuid, gpu.parent} for gpu in one.gpus))
            and self.period.meets(one.created, one.ended)
        )


@dataclass(frozen=True, slots=True)
class Totals:
    """What the table has: rows, and the bytes that they take on disk, more or less."""

    records: int = 0
    bytes: int = 0


@dataclass(eq=False)
class EndedStore:
    """Reads and writes the ended reservations. Every method raises as `Store.write` and `Store.read` do.

    The time of what an earlier boot wrote is counted from `opened`, when this process opened the state.
    """

    store: AllocatorStore
    boot_id: str
    opened: float

    async def totals(self) -> Totals:
        """What the table has."""
        names = {schema.ENDED_RECORDS: 0, schema.ENDED_BYTES: 0}
        return _totals(await self.store.read(lambda connection: count(connection, names)))

    async def forgotten(self) -> int:
        """When the youngest of all forgotten reservations ended, in seconds since 1970; 0 where none is."""
        names = {schema.FORGOTTEN: 0}
        return (await self.store.read(lambda connection: count(connection, names)))[schema.FORGOTTEN]

    async def short(self) -> bool:
        """Whether the disk lacks the room that is kept for ends of reservations, now."""
        return self.store.short and await self.store.look_for_room()

    async def retire(self, ids: Collection[str], fence: int) -> Totals:
        """Move ended reservations here; that `fence` is the highest one given stays known."""
        chosen = and_(_RESERVATION.c.id.in_(ids), _RESERVATION.c.state != State.ACTIVE.value)

        def work(connection: Connection) -> dict[str, int]:
            rows, size = _size(connection, _RESERVATION.c, chosen)
            moved = select(*(_RESERVATION.c[name] for name in _NAMES)).where(chosen)
            connection.execute(insert(_ENDED).from_select(_NAMES, moved))
            connection.execute(delete(_RESERVATION).where(chosen))
            changes = {schema.ENDED_RECORDS: rows, schema.ENDED_BYTES: size, schema.ROWS: -rows}
            return count(connection, changes)

        return await self._change(work, fence)

    async def drop_first(self, most: int, fence: int) -> Totals:
        """Forget the `most` records that are due to be forgotten first."""
        boot = _ENDED.c.boot_id
        first = select(_ENDED.c.fence).order_by(boot, _ENDED.c.deadline_seconds)
        # Ranges of an index, one after the other: "another boot" would have the whole of it read.
        ranges = (boot < self.boot_id, boot > self.boot_id, boot == self.boot_id)

        def work(connection: Connection) -> dict[str, int]:
            fences: list[int] = []
            for one in ranges:
                if len(fences) < most:
                    fences += connection.execute(first.where(one).limit(most - len(fences))).scalars()
            return _drop(connection, fences)

        return await self._change(work, fence)

    async def drop_due(self, now: float, most: int, fence: int) -> Totals:
        """Forget at most so many records whose time is over."""
        due = and_(_ENDED.c.boot_id == self.boot_id, _ENDED.c.deadline_seconds <= now)
        if now - self.opened >= RETENTION:
            due = or_(due, _ENDED.c.boot_id != self.boot_id)
        first = select(_ENDED.c.fence).where(due).limit(most)
        fences = await self.store.read(lambda connection: connection.execute(first).scalars().all())
        if not fences:
            return await self.totals()
        return await self._change(lambda connection: _drop(connection, fences), fence)

    async def find(self, *, ids: Collection[str] = (), requests: Collection[str] = ()) -> list[Reservation]:
        """Records by their ids and by the requests that they were granted for."""
        wanted = or_(_ENDED.c.id.in_(ids), _ENDED.c.request_id.in_(requests))
        return await self._read(wanted, len(ids) + len(requests))

    async def page(self, wanted: RecordFilter, *, after: int, most: int) -> tuple[list[Reservation], int]:
        """At most so many records with a higher fence, by fence; and the last fence that was looked at, if there are more.

        No index leads from a GPU or a time to its records, so that at most `LOOKED_AT` are looked at.
        """
        fence, last = _ENDED.c.fence, 0
        where = [fence > after]
        if wanted.holder:
            where.append(_ENDED.c.holder == wanted.holder)
        if wanted.gpu_uuid or wanted.period:
            ends = select(fence).where(*where).order_by(fence).offset(LOOKED_AT - 1).limit(1)
            last = await self.store.read(lambda connection: int(connection.execute(ends).scalar() or 0))
            where += [fence <= last] if last else []
        if wanted.gpu_uuid:
            where.append(cast(_ENDED.c.gpus, Text).contains(f'"{wanted.gpu_uuid}"', autoescape=True))
        if wanted.period.since is not None:
            where.append(_ENDED.c.end_time >= wanted.period.since.timestamp())
        if wanted.period.until is not None:
            where.append(_ENDED.c.create_time <= wanted.period.until.timestamp())
        return await self._read(and_(*where), most), last

    async def _read(self, wanted: ColumnElement[bool], most: int) -> list[Reservation]:
        query = select(*_SEALED).where(wanted).order_by(_ENDED.c.fence).limit(most)
        rows = await self.store.read(lambda connection: connection.execute(query).mappings().all())
        found: list[Reservation] = []
        for row in rows:
            if not is_whole(dict(row)):
                raise FailedPreconditionError(
                    f"the record of reservation {row['id']}, which has ended, is not as it was written: restore a copy",
                    reason="STATE_INCONSISTENT",
                )
            # Its lists and mappings are the text that was written.
            parsed = {"labels": json.loads(row["labels"]), "gpus": json.loads(row["gpus"])}
            one = from_row(SimpleNamespace(**{**row, **parsed, "preemptible": bool(row["preemptible"])}))
            found.append(one if row["boot_id"] == self.boot_id else rebased(one, self.opened))
        return found

    async def _change(self, work: Callable[[Connection], dict[str, int]], fence: int) -> Totals:
        counted: list[dict[str, int]] = []

        def change(connection: Connection) -> None:
            counted[:] = [work(connection)]

        await self.store.change(change, fence=fence)
        return _totals(counted[0])


def _drop(connection: Connection, fences: Sequence[int]) -> dict[str, int]:
    chosen = _ENDED.c.fence.in_(fences)
    rows, size = _size(connection, _ENDED.c, chosen)
    if youngest := connection.execute(select(func.max(_ENDED.c.end_time)).where(chosen)).scalar():
        note_forgotten(connection, youngest)
    connection.execute(delete(_ENDED).where(chosen))
    give_back(connection)
    return count(connection, {schema.ENDED_RECORDS: -rows, schema.ENDED_BYTES: -size})


def _size(connection: Connection, columns: Any, chosen: ColumnElement[bool]) -> tuple[int, int]:
    """How many rows there are, and the bytes that they take."""
    length: ColumnElement[Any] = func.length(cast(columns[_TEXTS[0]], Text))
    for name in _TEXTS[1:]:
        length = length + func.length(cast(columns[name], Text))
    rows, size = connection.execute(
        select(func.count(), func.coalesce(func.sum(length), 0)).where(chosen)
    ).one()
    return int(rows), int(size) + ROW_BYTES * int(rows)


def _totals(counted: dict[str, int]) -> Totals:
    return Totals(counted[schema.ENDED_RECORDS], counted[schema.ENDED_BYTES])


LOOKED_AT = 20_000
"""Most records that one page by GPU or time looks at: some 50 ms."""
IN_MEMORY = 4096
"""Ended reservations that memory keeps."""
PERIOD = 1.0
"""Seconds between two looks."""
DUE_PERIOD = 60.0
"""Seconds between two looks for records whose time is over."""
BATCH = 64
"""Most records in one transaction."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ArchiveLimits:
    """How many ended reservations are kept at most, and how many bytes of disk they may take."""

    records: int
    bytes: int


@dataclass(eq=False)
class Archive:
    """The records that are not in memory. `run` must run."""

    ledger: Ledger
    store: EndedStore
    limits: ArchiveLimits
    clock: Clock
    _totals: Totals = field(default_factory=Totals, init=False)
    _due_again: float = field(default=0.0, init=False)
    _failing: bool = field(default=False, init=False)

    async def open(self) -> None:
        """Learn how much there is. Raises UnavailableError: the state cannot be read."""
        self._totals = await self.store.totals()

    async def recall(self, *, ids: Collection[str] = (), requests: Collection[str] = ()) -> None:
        """Bring records back to memory, by their ids and by their requests, if there are any; all must be whole."""
        if not self._totals.records:
            return
        ids = [one for one in ids if not self.ledger.knows(one)]
        requests = [one for one in requests if not self.ledger.knows(request_id=one)]
        if ids or requests:
            self.ledger.restore(await self.store.find(ids=ids, requests=requests))

    async def page(self, wanted: RecordFilter, *, after: int, most: int) -> tuple[Sequence[Reservation], int]:
        """`EndedStore.page`. Raises as `recall`."""
        if not self._totals.records:
            return (), 0
        return await self.store.page(wanted, after=after, most=most)

    async def run(self) -> NoReturn:
        """Keep within the limits, for ever."""
        while True:
            await asyncio.sleep(PERIOD)
            try:
                await self.tidy()
                self._failing = False
            except (UnavailableError, FailedPreconditionError) as error:
                if not self._failing:
                    _log.warning("cannot move records of ended reservations", problem=error.message)
                self._failing = True

    async def tidy(self) -> None:
        """Move what memory has too much of to the disk, and drop what the disk has too much of."""
        if await self.store.short():
            _log.warning("the disk is full: records of ended reservations go before their time")
            while await self.store.short() and await self._drop(BATCH):
                pass
        while (over := self.ledger.ended_count - min(IN_MEMORY, self.limits.records)) > 0:
            chosen = self.ledger.first_ended(min(over, BATCH))
            self._totals = await self.store.retire([one.id for one in chosen], self.ledger.fence)
            for one in chosen:
                self.ledger.forget(one)
        while (over := self._too_many()) > 0 and await self._drop(min(over, BATCH)):
            pass
        if self.clock.now() >= self._due_again:
            before = Totals()
            while self._totals.records and before != self._totals:
                before = self._totals
                self._totals = await self.store.drop_due(self.clock.now(), BATCH, self.ledger.fence)
            self._due_again = self.clock.now() + DUE_PERIOD

    def _too_many(self) -> int:
        """How many records have to go; none where it is not positive."""
        totals, limits = self._totals, self.limits
        too_large = totals.bytes - limits.bytes
        return max(
            totals.records + self.ledger.ended_count - limits.records,
            math.ceil(too_large * totals.records / totals.bytes) if too_large > 0 else 0,
        )

    async def _drop(self, count: int) -> bool:
        """Drop the first records; False where there are none."""
        before, self._totals = self._totals, await self.store.drop_first(count, self.ledger.fence)
        return before != self._totals
