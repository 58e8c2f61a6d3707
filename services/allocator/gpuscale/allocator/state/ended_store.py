"""Ended reservations on disk: they move to a table of their own, which no start reads and which is bounded.

A row there is looked at when it is read: one that is not as it was written is refused.
"""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    Text,
    and_,
    cast,
    delete,
    func,
    insert,
    or_,
    select,
)

from gpuscale.allocator.domain.ledger import rebased, retention_of
from gpuscale.allocator.domain.model import Reservation, State
from gpuscale.allocator.state import schema_store as schema
from gpuscale.allocator.state.sealing import is_whole_reservation
from gpuscale.allocator.state.seals_store import as_sealed
from gpuscale.allocator.state.store import AllocatorStore, count
from gpuscale.common.errors import FailedPreconditionError
from gpuscale.common.store.sqlite_store import give_back

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
class Totals:
    """What the table has: rows, and the bytes that they take on disk, more or less."""

    records: int = 0
    bytes: int = 0


class EndedStore:
    """Reads and writes the ended reservations. Every method raises as `Store.write` and `Store.read` do.

    Args:
        store: the state.
        boot_id: of the current boot.
        opened: when this process opened the state: the time of what an earlier boot wrote is counted from then.
    """

    def __init__(self, store: AllocatorStore, boot_id: str, opened: float) -> None:
        self._store = store
        self._boot_id = boot_id
        self._opened = opened

    async def totals(self) -> Totals:
        """What the table has."""
        names = {schema.ENDED_RECORDS: 0, schema.ENDED_BYTES: 0}
        return _totals(await self._store.read(lambda connection: count(connection, names)))

    async def short(self) -> bool:
        """Whether the disk lacks the room that is kept for ends of reservations, now."""
        return self._store.short and await self._store.look_for_room()

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
        boot, first = (
            _ENDED.c.boot_id,
            select(_ENDED.c.fence).order_by(_ENDED.c.boot_id, _ENDED.c.deadline_seconds),
        )
        # Ranges of an index, one after the other: "another boot" would have the whole of it read.
        ranges = (boot < self._boot_id, boot > self._boot_id, boot == self._boot_id)

        def work(connection: Connection) -> dict[str, int]:
            fences: list[int] = []
            for one in ranges:
                if len(fences) < most:
                    fences += connection.execute(first.where(one).limit(most - len(fences))).scalars()
            return _drop(connection, fences)

        return await self._change(work, fence)

    async def drop_due(self, now: float, most: int, fence: int) -> Totals:
        """Forget at most so many records whose time is over."""
        due = and_(_ENDED.c.boot_id == self._boot_id, _ENDED.c.deadline_seconds <= now)
        if (waited := now - self._opened) >= retention_of(0.0):
            long = 2 * _ENDED.c.ttl_seconds <= waited
            due = or_(due, and_(_ENDED.c.boot_id != self._boot_id, long))
        fences = await self._store.read(
            lambda connection: (
                connection.execute(select(_ENDED.c.fence).where(due).limit(most)).scalars().all()
            )
        )
        if not fences:
            return await self.totals()
        return await self._change(lambda connection: _drop(connection, fences), fence)

    async def find(self, *, ids: Collection[str] = (), requests: Collection[str] = ()) -> list[Reservation]:
        """Records by their ids and by the requests that they were granted for."""
        wanted = or_(_ENDED.c.id.in_(ids), _ENDED.c.request_id.in_(requests))
        return await self._read(wanted, len(ids) + len(requests))

    async def page(self, *, after: int, holder: str, most: int) -> list[Reservation]:
        """At most so many records with a higher fence, by fence; all holders' if `holder` is empty."""
        wanted = _ENDED.c.fence > after
        return await self._read(and_(wanted, _ENDED.c.holder == holder) if holder else wanted, most)

    async def _read(self, wanted: ColumnElement[bool], most: int) -> list[Reservation]:
        query = select(*_SEALED).where(wanted).order_by(_ENDED.c.fence).limit(most)
        rows = await self._store.read(lambda connection: connection.execute(query).mappings().all())
        found = [(_to_reservation(row), row["boot_id"]) for row in rows]
        return [one if boot == self._boot_id else rebased(one, self._opened) for one, boot in found]

    async def _change(self, work: Callable[[Connection], dict[str, int]], fence: int) -> Totals:
        counted: list[dict[str, int]] = []

        def change(connection: Connection) -> None:
            counted[:] = [work(connection)]

        await self._store.change(change, fence=fence)
        return _totals(counted[0])


def _drop(connection: Connection, fences: Sequence[int]) -> dict[str, int]:
    chosen = _ENDED.c.fence.in_(fences)
    rows, size = _size(connection, _ENDED.c, chosen)
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


def _to_reservation(row: RowMapping) -> Reservation:
    """The reservation of a row whose lists and mappings are the text that was written.

    Raises:
        FailedPreconditionError: STATE_INCONSISTENT, it is not as it was written.
    """
    if not is_whole_reservation(dict(row)):
        raise FailedPreconditionError(
            f"the record of reservation {row['id']}, which has ended, is not as it was written: restore a copy",
            reason="STATE_INCONSISTENT",
        )
    parsed = {"labels": json.loads(row["labels"]), "gpus": json.loads(row["gpus"])}
    return schema.from_row(SimpleNamespace(**{**row, **parsed, "preemptible": bool(row["preemptible"])}))
