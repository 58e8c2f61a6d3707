"""Archive: ended reservations leave memory, and leave the disk when there are too many.

Memory keeps those that ended last; the rows of older ones are archived where they are, and read on demand, or when their
request is repeated. No start reads them: a row is checked when it is read, and refused if it is damaged. They are bounded by
time, number and bytes; records that expire first go first.
"""

import asyncio
import json
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NoReturn

from sqlalchemy import ColumnElement, Connection, Text, and_, cast, delete, func, literal, or_, select, update

from gpuscale.allocator.domain.ledger import RETENTION, Ledger, rebased
from gpuscale.allocator.domain.model import Reservation, State
from gpuscale.allocator.state import schema
from gpuscale.allocator.state.integrity import as_sealed, is_whole
from gpuscale.allocator.state.store import AllocatorStore, count, from_row, note_forgotten
from gpuscale.common.errors import FailedPreconditionError, UnavailableError
from gpuscale.common.runtime.logs import Attempts, get_logger
from gpuscale.common.runtime.tasks import Clock
from gpuscale.common.store.sqlite_store import give_back
from gpuscale.common.wire import ANY_TIME, TimeRange

ROW_BYTES = 200
"""Bytes of a row on disk beyond its texts: numbers, and its entries in four indexes."""

_RESERVATION = schema.RESERVATION
_TEXTS = (
    *("id", "request_id", "fingerprint", "holder", "owner", "labels", "policy", "gpus", "tenant"),
    "end_reason",
)
_length: ColumnElement[Any] = literal(0)
for _name in _TEXTS:
    _length += func.length(cast(_RESERVATION.c[_name], Text))
_SIZE = select(func.count(), func.coalesce(func.sum(_length), 0))
_SEALED = [as_sealed(column) for column in _RESERVATION.columns]


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """Which reservations a reader wants: by holder, GPU (or an instance of it), time, and node; all by default."""

    holder: str = ""
    gpu_uuid: str = ""
    period: TimeRange = ANY_TIME
    node: str = ""

    def __contains__(self, one: Reservation) -> bool:
        return (
            self.holder in {"", one.holder}
            and (not self.gpu_uuid or any(self.gpu_uuid in {gpu.uuid, gpu.parent} for gpu in one.gpus))
            and self.period.meets(one.created, one.ended)
            and (not self.node or any(self.node == gpu.node for gpu in one.gpus))
        )


@dataclass(frozen=True, slots=True)
class Totals:
    """A number of archived rows, and roughly their bytes on disk."""

    records: int = 0
    bytes: int = 0


@dataclass(eq=False)
class EndedStore:
    """Reads and writes archived reservations. Every method raises like `Store.write` and `Store.read`.

    Times written by an earlier boot count from `opened`, when this process opened the state.
    """

    store: AllocatorStore
    boot_id: str
    opened: float

    async def totals(self) -> Totals:
        """The size of the archive."""
        names = {schema.ENDED_RECORDS: 0, schema.ENDED_BYTES: 0}
        return _totals(await self.store.read(lambda connection: count(connection, names)))

    async def forgotten(self) -> int:
        """When the youngest forgotten reservation ended, in seconds since 1970; 0 if none was forgotten."""
        names = {schema.FORGOTTEN: 0}
        return (await self.store.read(lambda connection: count(connection, names)))[schema.FORGOTTEN]

    async def short(self) -> bool:
        """Whether the disk is now below the space reserved for ends of reservations."""
        return self.store.short and await self.store.look_for_room()

    async def retire(self, fences: Collection[int], fence: int) -> Totals:
        """Archive ended reservations, by their fences, and record the highest `fence`."""
        ended = _RESERVATION.c.state != State.ACTIVE.value

        def work(connection: Connection) -> dict[str, int]:
            chosen = and_(_among(connection, fences), schema.KEPT, ended)
            rows, size = _size(connection, chosen)
            connection.execute(update(_RESERVATION).where(chosen).values(archived=1))
            changes = {schema.ENDED_RECORDS: rows, schema.ENDED_BYTES: size, schema.ROWS: -rows}
            return count(connection, changes)

        return await self._change(work, fence)

    async def drop_first(self, most: int, fence: int) -> Totals:
        """Forget the `most` records that expire first."""
        boot = _RESERVATION.c.boot_id
        first = select(_RESERVATION.c.fence).where(schema.ARCHIVED)
        first = first.order_by(boot, _RESERVATION.c.deadline_seconds, _RESERVATION.c.fence)
        # Index ranges one after the other: "another boot" would scan the whole index.
        ranges = (boot < self.boot_id, boot > self.boot_id, boot == self.boot_id)

        def work(connection: Connection) -> dict[str, int]:
            fences: list[int] = []
            for one in ranges:
                if len(fences) < most:
                    fences += connection.execute(first.where(one).limit(most - len(fences))).scalars()
            return _drop(connection, fences)

        return await self._change(work, fence)

    async def drop_due(self, now: float, most: int, fence: int) -> Totals:
        """Forget at most `most` expired records."""
        due = and_(_RESERVATION.c.boot_id == self.boot_id, _RESERVATION.c.deadline_seconds <= now)
        if now - self.opened >= RETENTION:
            due = or_(due, _RESERVATION.c.boot_id != self.boot_id)
        first = select(_RESERVATION.c.fence).where(due, schema.ARCHIVED).limit(most)
        fences = await self.store.read(lambda connection: connection.execute(first).scalars().all())
        if not fences:
            return await self.totals()
        return await self._change(lambda connection: _drop(connection, fences), fence)

    async def find(self, *, ids: Collection[str] = (), requests: Collection[str] = ()) -> list[Reservation]:
        """Find records by id and by request id."""
        wanted = or_(_RESERVATION.c.id.in_(ids), _RESERVATION.c.request_id.in_(requests))
        return await self._read(wanted, len(ids) + len(requests))

    async def page(self, wanted: RecordFilter, *, after: int, most: int) -> tuple[list[Reservation], int]:
        """At most `most` records with a higher fence, by fence; and the last fence examined, if there are more.

        No index leads from a GPU or a time to its records, so at most `LOOKED_AT` are examined.
        """
        fence, last = _RESERVATION.c.fence, 0
        where = [fence > after]
        if wanted.holder:
            where.append(_RESERVATION.c.holder == wanted.holder)
        if wanted.gpu_uuid or wanted.period:
            ends = select(fence).where(*where, schema.ARCHIVED).order_by(fence).offset(LOOKED_AT - 1).limit(1)
            last = await self.store.read(lambda connection: int(connection.execute(ends).scalar() or 0))
            where += [fence <= last] if last else []
        if wanted.gpu_uuid:
            where.append(cast(_RESERVATION.c.gpus, Text).contains(f'"{wanted.gpu_uuid}"', autoescape=True))
        if wanted.period.since is not None:
            where.append(_RESERVATION.c.end_time >= wanted.period.since.timestamp())
        if wanted.period.until is not None:
            where.append(_RESERVATION.c.create_time <= wanted.period.until.timestamp())
        return await self._read(and_(*where), most), last

    async def _read(self, wanted: ColumnElement[bool], most: int) -> list[Reservation]:
        query = select(*_SEALED).where(wanted, schema.ARCHIVED).order_by(_RESERVATION.c.fence).limit(most)
        rows = await self.store.read(lambda connection: connection.execute(query).mappings().all())
        found: list[Reservation] = []
        for row in rows:
            if not is_whole(dict(row)):
                raise FailedPreconditionError(
                    f"the record of reservation {row['id']}, which has ended, does not match its checksum: restore a copy",
                    reason="STATE_INCONSISTENT",
                )
            # Its lists and mappings are still the stored text.
            parsed = {"labels": json.loads(row["labels"]), "gpus": json.loads(row["gpus"])}
            one = from_row(SimpleNamespace(**{**row, **parsed, "preemptible": bool(row["preemptible"])}))
            found.append(one if row["boot_id"] == self.boot_id else rebased(one, self.opened))
        return found

    async def _change(self, work: Callable[[Connection], dict[str, int]], fence: int) -> Totals:
        return _totals(await self.store.change(work, fence=fence))


def _drop(connection: Connection, fences: Sequence[int]) -> dict[str, int]:
    chosen = and_(_among(connection, fences), schema.ARCHIVED)
    rows, size = _size(connection, chosen)
    if youngest := connection.execute(select(func.max(_RESERVATION.c.end_time)).where(chosen)).scalar():
        note_forgotten(connection, youngest)
    connection.execute(delete(_RESERVATION).where(chosen))
    give_back(connection)
    return count(connection, {schema.ENDED_RECORDS: -rows, schema.ENDED_BYTES: -size})


def _among(connection: Connection, fences: Collection[int]) -> ColumnElement[bool]:
    """Whether a row has one of these fences: for SQLite one parameter, since to expand a thousand takes as long as to find them."""
    one = select(func.json_each(json.dumps([*fences])).table_valued("value").c.value)
    return _RESERVATION.c.fence.in_(one if connection.dialect.name == "sqlite" else fences)


def _size(connection: Connection, chosen: ColumnElement[bool]) -> tuple[int, int]:
    rows, size = connection.execute(_SIZE.where(chosen)).one()
    return int(rows), int(size) + ROW_BYTES * int(rows)


def _totals(counted: dict[str, int]) -> Totals:
    return Totals(counted[schema.ENDED_RECORDS], counted[schema.ENDED_BYTES])


LOOKED_AT = 20_000
"""Most records that one page by GPU or time examines: about 50 ms."""
IN_MEMORY = 4096
"""Ended reservations kept in memory."""
PERIOD = 1.0
"""Seconds between two looks."""
DUE_PERIOD = 60.0
"""Seconds between two looks for expired records."""
BATCH = 1024
"""Most records in one transaction: their ids and requests lie anywhere in two indexes, so few change many pages for each."""

_log = get_logger(__name__)


@dataclass(eq=False)
class Archive:
    """The records that are not in memory, `limits` the most that are kept of all ended ones. `run` must run."""

    ledger: Ledger
    store: EndedStore
    limits: Totals
    clock: Clock
    _totals: Totals = field(default_factory=Totals, init=False)
    _due_again: float = field(default=0.0, init=False)

    async def open(self) -> None:
        """Load the archive's size. Raises UnavailableError if the state cannot be read."""
        self._totals = await self.store.totals()

    async def recall(self, *, ids: Collection[str] = (), requests: Collection[str] = ()) -> None:
        """Load records back into memory, by id and by request id, if there are any; damaged ones are refused."""
        if not self._totals.records:
            return
        ids = [one for one in ids if not self.ledger.knows(one)]
        requests = [one for one in requests if not self.ledger.knows(request_id=one)]
        if ids or requests:
            self.ledger.restore(await self.store.find(ids=ids, requests=requests))

    async def page(self, wanted: RecordFilter, *, after: int, most: int) -> tuple[Sequence[Reservation], int]:
        """Like `EndedStore.page`, without a read while nothing is archived. Raises like `recall`."""
        if not self._totals.records:
            return (), 0
        return await self.store.page(wanted, after=after, most=most)

    async def run(self) -> NoReturn:
        """Enforce the limits, for ever."""
        what = "cannot archive records of ended reservations"
        tidying = Attempts(_log, what, UnavailableError, FailedPreconditionError)
        while True:
            await asyncio.sleep(PERIOD)
            with tidying:
                await self.tidy()

    async def tidy(self) -> None:
        """Drop surplus records from memory, and from disk."""
        while await self.store.short() and self._totals.records and await self._drop(BATCH):
            _log.warning("the disk is full: dropped records of ended reservations early")
        while (over := self.ledger.ended_count - min(IN_MEMORY, self.limits.records)) > 0:
            chosen = self.ledger.first_ended(min(over, BATCH))
            self._totals = await self.store.retire([one.fence for one in chosen], self.ledger.fence)
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
        """How many records must go; none if not positive."""
        totals, limits = self._totals, self.limits
        too_large = totals.bytes - limits.bytes
        return max(
            totals.records + self.ledger.ended_count - limits.records,
            math.ceil(too_large * totals.records / totals.bytes) if too_large > 0 else 0,
        )

    async def _drop(self, count: int) -> bool:
        """Drop the first records; False if there are none."""
        before, self._totals = self._totals, await self.store.drop_first(count, self.ledger.fence)
        return before != self._totals
