"""Store: what the allocator must never forget, in SQLite or PostgreSQL. SQLModel has the schema, Core statements write.

The database itself refuses to give more of a GPU than there is (see `schema.Hold`), and `request_id` is unique, so it refuses a
second grant for one request.
"""

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from pydantic import TypeAdapter
from pydantic_core import to_json
from sqlalchemy import (
    ColumnElement,
    Connection,
    bindparam,
    delete,
    func,
    insert,
    literal_column,
    or_,
    select,
    update,
)

from gpuscale.allocator.domain import model
from gpuscale.allocator.domain.jobs import ReservedJob
from gpuscale.allocator.domain.ledger import KEY_PARTS
from gpuscale.allocator.state import integrity, schema
from gpuscale.common.errors import AbortedError, FailedPreconditionError, GpuscaleError, UnavailableError
from gpuscale.common.secrets import SecretUrl
from gpuscale.common.store.sqlite_store import Sqlite
from gpuscale.common.store.store import Prepared, Store, revisions
from gpuscale.common.store.term import Term

SERVICE = "allocator"
"""The name of its threads, failpoints, and PostgreSQL schema."""
MADE_BY = "\x1f"
"""Separates the owner from who made a reservation for it, in the column `owner`: older rows and their sums stay valid."""
JOB = "\x1d"
"""Separates the end reason of a reservation from its job, in the column `end_reason`, for the same reason."""
WANTED = "\x1e"
"""Precedes what it waits for, waited for or needs elsewhere, in the same column, after its job."""
UNTIL = "\x1c"
"""Precedes the boot time at which a reservation ends at the latest, at the end of the same column."""
T = TypeVar("T")
_Reservations: TypeAlias = Sequence[model.Reservation]
_Work: TypeAlias = Callable[[Connection], object] | None
_Done: TypeAlias = Callable[[Exception | None, object], None]

_JOB, _WANTED = TypeAdapter(ReservedJob), TypeAdapter(model.Wanted)
_TABLES = schema.Table.metadata.tables
_RESERVATION, _HOLD = schema.RESERVATION, schema.HOLD
_RANK, _COUNTER = _TABLES["rank"], _TABLES["counter"]

_AS_WRITTEN = [
    column for column in integrity.LASTING if column not in {"owner", "policy", "create_time", "gpus"}
]
_CHANGING = (*(column for column in integrity.LIFE if column != "id"), "life_sum")
_WRITTEN = {one: str(model.State.ACTIVE if one is model.State.PENDING else one) for one in model.State}
_ACTIVE: ColumnElement[str] = literal_column(f"'{model.State.ACTIVE.value}'")
_COLUMNS: dict[str, Any] = {column.name: bindparam(column.name) for column in _RESERVATION.columns}
_ADD = Prepared(insert(_RESERVATION).values({**_COLUMNS, "archived": literal_column("0")}))
_HOLD_GPUS = Prepared(insert(_HOLD))
_OF_ONE = _HOLD.c.reservation_id == bindparam("key")
_FREE_GPU = Prepared(delete(_HOLD).where(_HOLD.c.gpu_uuid == bindparam("gpu"), _OF_ONE))
_FREE_GPUS = Prepared(delete(_HOLD).where(_OF_ONE))
# An ended reservation never lives again, whatever a late write says.
_CHANGE = Prepared(
    update(_RESERVATION)
    .where(_RESERVATION.c.fence == bindparam("fence"), schema.KEPT)
    .where(or_(_RESERVATION.c.state == _ACTIVE, _RESERVATION.c.state == bindparam("state")))
    .values({column: bindparam(column) for column in _CHANGING})
)
_CHANGE_GPUS = Prepared(
    update(_RESERVATION)
    .where(_RESERVATION.c.id == bindparam("id"), schema.KEPT)
    .values(gpus=bindparam("gpus"), lasting_sum=bindparam("lasting_sum"))
)
_BEGIN = Prepared(
    update(_RESERVATION)
    .where(_RESERVATION.c.id == bindparam("id"), schema.KEPT)
    .values(gpus=bindparam("gpus"), fence=bindparam("fence"), lasting_sum=bindparam("lasting_sum"))
)
_FORGET = Prepared(delete(_RESERVATION).where(_RESERVATION.c.fence == bindparam("fence"), schema.KEPT))
_COUNT = Prepared.replacing(_COUNTER)
_COUNTED = Prepared(select(_COUNTER.c.value).where(_COUNTER.c.name == bindparam("name")))
_PUT_RANKS = Prepared.replacing(_RANK)


@dataclass(frozen=True, slots=True)
class Saved:
    """The content of the disk.

    `reservations` come oldest first, each with the boot id of its deadline; `fence` is the highest one given when a record was
    last forgotten, `ranks` the rank of every node ever seen.
    """

    reservations: Sequence[tuple[model.Reservation, str]]
    fence: int
    ranks: Mapping[str, int]


class AllocatorStore:
    """Reads and writes of the allocator's state.

    Every write returns once it is on disk, and raises UnavailableError, with the store's reason, if it fails.

    `guard` numbers the writes; all deadlines written belong to the boot `boot_id`. `beside` returns what else to write with the
    reservations that change.
    """

    def __init__(self, store: Store, guard: integrity.Numbering, boot_id: str) -> None:
        self._store = store
        self._guard = guard
        self._boot_id = boot_id
        self.beside: Callable[[_Reservations], _Work] = lambda _: None

    async def read(self, work: Callable[[Connection], T]) -> T:
        """Read other tables in the file. Raises like `Store.read`."""
        return await self._store.read(work)

    async def change(self, work: Callable[[Connection], T], *, fence: int = 0) -> T:
        """Write other tables in the file, and record a `fence` if given; the work's result. Raises like `Store.write`."""
        return await self._store.write(self._numbered(work, fence), frees=True)

    def _numbered(self, work: Callable[[Connection], T], fence: int) -> Callable[[Connection], T]:
        def numbered(connection: Connection) -> T:
            number = self._guard.next()
            result = work(connection)
            if fence:
                _COUNT.run(connection, [integrity.sealed({"name": schema.FENCE, "value": fence})])
            self._note(connection, number)
            self._guard.wrote(number)
            return result

        return numbered

    @property
    def short(self) -> bool:
        """Whether the disk is below the space reserved for ends of reservations: nothing is granted then."""
        return self._store.short

    async def look_for_room(self) -> bool:
        """Check again whether the disk is `short`. Raises like `Store.write`."""
        await self._store.write(lambda _: None)
        return self._store.short

    async def load(self) -> Saved:
        """Read everything except archived reservations, and start to record acknowledged writes.

        STATE_INCONSISTENT if the holds do not match the live reservations, or the file is damaged.
        """
        saved = await self._store.read(_load)
        self._guard.accepted()
        return saved

    async def lease_key(self) -> Sequence[int]:
        """The key of lease tokens, created and written if there is none yet."""
        names = [f"{schema.LEASE_KEY}_{number}" for number in range(KEY_PARTS)]
        found = await self.read(lambda connection: count(connection, dict.fromkeys(names, 0)))
        key = [*found.values()]
        if not all(key):
            key = [secrets.randbits(63) for _ in names]
            rows = [
                integrity.sealed({"name": name, "value": part}) for name, part in zip(names, key, strict=True)
            ]
            await self.change(lambda connection: _COUNT.run(connection, rows))
        return key

    async def save(
        self, added: _Reservations, changed: _Reservations, begun: _Reservations = (), also: _Work = None
    ) -> None:
        """Write new reservations with their holds, and changes in the life of others, in one transaction.

        Ended ones free their GPUs, and `also` writes their notifications; changed ones in `begun` hold others from here on, or
        none.

        Raises:
            UnavailableError: also with reason STATE_CONFLICT if the state refuses one of them, or REQUEST_ENDED with
                their `request_ids` if what was granted for a request has ended: then none is written.
        """
        beside = self.beside(changed) if changed else None
        await self._write(partial(self._save, beside, added, changed, begun, also), added)

    def begin(
        self, added: _Reservations, changed: _Reservations, begun: _Reservations, also: _Work, done: _Done
    ) -> None:
        """Start what `save` does, as `Store.begin`; `why` tells what `save` raises for the error that `done` gets."""
        beside = self.beside(changed) if changed else None
        self._store.begin(partial(self._save, beside, added, changed, begun, also), done)

    def _save(
        self,
        beside: _Work,
        added: _Reservations,
        changed: _Reservations,
        begun: _Reservations,
        also: _Work,
        connection: Connection,
    ) -> None:
        number, rows, boot_id = self._guard.next(), self._guard.rows, self._boot_id
        if beside is not None:
            beside(connection)
        if added:
            _ADD.run(connection, [to_row(one, boot_id, number) for one in added])
            _HOLD_GPUS.run(connection, [hold for one in added for hold in to_holds(one)])
            if rows is None:
                rows = count(connection, {schema.ROWS: 0})[schema.ROWS]
            rows += len(added)
            _COUNT.run(connection, [integrity.sealed({"name": schema.ROWS, "value": rows})])
        if begun:  # first, since they are changed under their new fences
            _BEGIN.run(connection, [{**to_lost(one), "fence": one.fence} for one in begun])
            _FREE_GPUS.run(connection, [{"key": one.id} for one in begun])
            last = {one.id: one for one in begun}  # one may begin and leave in one write
            _HOLD_GPUS.run(connection, [hold for one in last.values() for hold in to_holds(one)])
        if changed:
            lives = [to_changes(one, boot_id, number) for one in changed]
            if _CHANGE.run(connection, lives) < len(changed) and not added:
                self._note(connection, number)  # no row may have it: they had ended
            ended = [one for one in changed if not one.live]
            if freed := [{"gpu": gpu.uuid, "key": one.id} for one in ended for gpu in one.gpus]:
                _FREE_GPU.run(connection, freed)  # by key: the holds are those of its last value
            if lost := [one for one in ended if one.state is model.State.LOST]:
                _CHANGE_GPUS.run(connection, [to_lost(one) for one in lost])
        if also is not None:
            also(connection)
        self._guard.wrote(number, rows)

    async def forget(self, ended: Sequence[model.Reservation], fence: int) -> None:
        """Delete records of ended reservations, and record the highest `fence`."""

        def work(connection: Connection) -> None:
            gone = _FORGET.run(connection, [{"fence": one.fence} for one in ended])
            count(connection, {schema.ROWS: -gone})
            ends = (one.ended.timestamp() for one in ended if one.ended is not None)
            note_forgotten(connection, max(ends, default=0.0))

        await self._write(self._numbered(work, fence))

    async def save_ranks(self, ranks: Mapping[str, int]) -> None:
        """Write the ranks of new nodes, replacing any that could not be deleted."""
        rows = [integrity.sealed({"node": node, "rank": rank}) for node, rank in ranks.items()]
        await self._write(lambda connection: _PUT_RANKS.run(connection, rows))

    async def forget_rank(self, node: str, rank: int) -> None:
        """Delete the rank of a node, unless it has a new one by now."""
        gone = delete(_RANK).where(_RANK.c.node == node, _RANK.c.rank == rank)
        await self._write(lambda connection: connection.execute(gone))

    def _note(self, connection: Connection, number: int) -> None:
        """Record a write number that no reservation has."""
        _COUNT.run(connection, [integrity.sealed({"name": integrity.LAST_WRITE, "value": number})])

    async def _write(self, work: Callable[[Connection], object], added: _Reservations = ()) -> None:
        try:
            await self._store.write(work, frees=True)  # `commits` refuses what takes room
        except UnavailableError:
            raise
        except GpuscaleError as error:
            raise await self.why(error, added) from error

    async def why(self, error: Exception, added: _Reservations) -> UnavailableError:
        """What `save` raises where the store has ended with an error; raises one that is not of the state."""
        try:
            if isinstance(error, AbortedError):
                # What was granted for some of the requests may have ended, and be archived.
                request_id = _RESERVATION.c.request_id
                requests = request_id.in_([one.request_id for one in added])
                known = select(request_id).where(requests, schema.ARCHIVED)
                found = await self._store.read(lambda connection: connection.execute(known).scalars().all())
                if found:
                    problem = "what was granted for the request has ended"
                    ids = ",".join(found)
                    error = AbortedError(problem, reason="REQUEST_ENDED", metadata={"request_ids": ids})
            raise error
        except UnavailableError as same:  # not everybody is told of a database
            return same
        except GpuscaleError as other:
            return UnavailableError(
                other.message, reason=other.reason, metadata=other.metadata, retry_after=other.retry_after
            )


def count(connection: Connection, changes: Mapping[str, int]) -> dict[str, int]:
    """Add to counters inside the open transaction; returns their values."""
    values: dict[str, int] = {}
    for name, change in changes.items():
        found = _COUNTED.first(connection, {"name": name})
        values[name] = change + (int(str(found[0])) if found else 0)
        if change:
            _COUNT.run(connection, [integrity.sealed({"name": name, "value": values[name]})])
    return values


def note_forgotten(connection: Connection, end_time: float) -> None:
    """Record, inside the open transaction, that a reservation that ended then is forgotten."""
    known = count(connection, {schema.FORGOTTEN: 0})[schema.FORGOTTEN]
    count(connection, {schema.FORGOTTEN: max(0, ceil(end_time) - known)})


def _load(connection: Connection) -> Saved:
    rows = connection.execute(select(_RESERVATION).where(schema.KEPT).order_by(_RESERVATION.c.fence)).all()
    reservations = [(from_row(row), row.boot_id) for row in rows]
    # The holds match the live reservations: otherwise another program wrote them.
    expected = {
        (hold["gpu_uuid"], hold["reservation_id"], hold["milli"])
        for one, _ in reservations
        if one.live
        for hold in to_holds(one)
    }
    holds = connection.execute(select(_HOLD)).mappings()
    held = {(hold["gpu_uuid"], hold["reservation_id"], hold["milli"]) for hold in holds}
    if expected != held:
        different = sorted(expected ^ held)
        raise FailedPreconditionError(
            f"the stored holds do not match the live reservations (first difference: {different[0]});"
            " nothing is granted and nothing was changed",
            reason="STATE_INCONSISTENT",
        )
    # All written rows are there: one that was deleted by hand may have been a grant.
    known = count(connection, {schema.ROWS: 0, schema.ENDED_RECORDS: 0, schema.FENCE: 0})
    archived = connection.execute(select(func.count()).select_from(_RESERVATION)).scalar_one() - len(rows)
    for kind, found, name in (
        ("reservation", len(rows), schema.ROWS),
        ("archived reservation", archived, schema.ENDED_RECORDS),
    ):
        if found != known[name]:
            raise FailedPreconditionError(
                f"the state has {found} rows of {kind}, but {known[name]} were written; nothing is granted and"
                " nothing was changed: restore a copy",
                reason="STATE_INCONSISTENT",
            )
    ranks = {row["node"]: row["rank"] for row in connection.execute(select(_RANK)).mappings()}
    return Saved(reservations, known[schema.FENCE], ranks)


def to_row(reservation: model.Reservation, boot_id: str, number: int) -> dict[str, object]:
    """The row of a reservation in the driver's form: lists and mappings as JSON."""
    row = to_lasting(reservation)
    row["lasting_sum"] = integrity.total(row.values())
    row.update(to_changes(reservation, boot_id, number))
    return row


def to_lasting(reservation: model.Reservation) -> dict[str, object]:
    """The columns that only change if a GPU is lost: `integrity.LASTING`."""
    made_by = f"{MADE_BY}{reservation.made_by}" if reservation.made_by else ""
    return {
        "id": reservation.id,
        "fence": reservation.fence,
        "request_id": reservation.request_id,
        "fingerprint": reservation.fingerprint,
        "holder": reservation.holder,
        "owner": f"{reservation.owner}{made_by}",
        # The same spelling in every version: a row that lost a GPU gets a new sum without rewriting these.
        "labels": json.dumps(dict(reservation.labels)) if reservation.labels else "{}",
        "policy": str(reservation.policy),
        "create_time": reservation.created.timestamp(),
        "tenant": reservation.tenant,
        "priority": reservation.priority,
        "preemptible": int(reservation.preemptible),
        "cpu_milli": reservation.cpu_milli,
        "host_memory_bytes": reservation.host_memory_bytes,
        "member_count": reservation.member_count,
        "gpus": to_gpus(reservation),
    }


def to_changes(reservation: model.Reservation, boot_id: str, number: int) -> dict[str, object]:
    """The columns that a write of this number changes: `integrity.LIFE`, their sum, and the fence."""
    revoke_at, job = reservation.revoke_at, reservation.job
    row: dict[str, object] = {
        "id": reservation.id,
        "state": _WRITTEN[reservation.state],
        "ttl_seconds": float(reservation.ttl),
        "deadline_seconds": float(reservation.deadline),
        "boot_id": boot_id,
        "end_time": reservation.ended.timestamp() if reservation.ended else None,
        "revoke_seconds": None if revoke_at is None else float(revoke_at),
        "end_reason": reservation.end_reason
        + (f"{JOB}{to_json(job).decode()}" if job else "")
        + (f"{WANTED}{to_json(reservation.wanted).decode()}" if reservation.wanted else "")
        + ("" if reservation.until is None else f"{UNTIL}{reservation.until}"),
        "write_number": number,
    }
    row["life_sum"], row["fence"] = integrity.total_of_life(row.values()), reservation.fence
    return row


def to_lost(reservation: model.Reservation) -> dict[str, object]:
    """The other columns that change if a GPU is lost, with their sum."""
    row = to_lasting(reservation)
    return {"id": reservation.id, "gpus": row["gpus"], "lasting_sum": integrity.total(row.values())}


def to_gpus(reservation: model.Reservation) -> str:
    """The GPUs of a reservation, as JSON."""
    rows: list[dict[str, object]] = []
    for gpu in reservation.gpus:
        row: dict[str, object] = {
            "node": gpu.node,
            "uuid": gpu.uuid,
            "index": gpu.index,
            "model": gpu.model,
            "simulated": gpu.simulated,
            "score": gpu.score.total,
            "parts": [[part.name, part.value, part.weight] for part in gpu.score.parts],
            "note": gpu.score.note,
            "milli": gpu.milli,
            "memory": gpu.memory_bytes,
            "member": gpu.member,
            "lost": gpu.lost,
        }
        if gpu.parent:
            row["parent"] = gpu.parent
        rows.append(row)
    return to_json(rows).decode()


def to_holds(one: model.Reservation) -> Sequence[dict[str, object]]:
    """What a live reservation holds: a row per GPU."""
    held: dict[str, int] = {}
    for gpu in one.gpus:
        held[gpu.uuid] = held.get(gpu.uuid, 0) + gpu.milli
    return [{"gpu_uuid": uuid, "reservation_id": one.id, "milli": milli} for uuid, milli in held.items()]


def from_row(row: Any) -> model.Reservation:
    """The reservation of a row, with its JSON columns parsed."""
    owner, _, made_by = row.owner.partition(MADE_BY)
    life, _, until = row.end_reason.partition(UNTIL)
    rest, _, wanted = life.partition(WANTED)
    end_reason, _, job = rest.partition(JOB)
    return model.Reservation(
        **{name: getattr(row, name) for name in _AS_WRITTEN},
        owner=owner,
        made_by=made_by,
        policy=model.Policy(row.policy),
        gpus=tuple(
            model.ReservedGpu(
                **{name: gpu[name] for name in ("node", "uuid", "index", "model", "simulated")},
                score=model.Score(
                    gpu["score"], tuple(model.ScorePart(*part) for part in gpu["parts"]), gpu["note"]
                ),
                # Rows of schema version 1 knew whole GPUs only.
                milli=gpu.get("milli", model.WHOLE),
                memory_bytes=gpu.get("memory"),
                member=gpu.get("member", 0),
                lost=gpu.get("lost", False),
                parent=gpu.get("parent", ""),
            )
            for gpu in row.gpus
        ),
        ttl=row.ttl_seconds,
        state=model.State(row.state),
        deadline=row.deadline_seconds,
        created=datetime.fromtimestamp(row.create_time, UTC),
        ended=None if row.end_time is None else datetime.fromtimestamp(row.end_time, UTC),
        revoke_at=row.revoke_seconds,
        end_reason=end_reason,
        job=_JOB.validate_json(job) if job else None,
        wanted=_WANTED.validate_json(wanted) if wanted else None,
        until=float(until) if until else None,
    )


MIGRATIONS = revisions("gpuscale.allocator.state.migrations", schema.VERSION)
"""By the version that they start from."""


@asynccontextmanager
async def open_store(path: Path, boot_id: str) -> AsyncGenerator[AllocatorStore]:
    """Open the file, or create it.

    FailedPreconditionError if it is damaged, differs from what was acknowledged, or has another version; it stays as it is.
    """
    guard = integrity.StateGuard(path)
    await asyncio.to_thread(guard.witness.check_before)
    backend = Sqlite(path, schema.Table.metadata, schema.VERSION, MIGRATIONS, guard, integrity.UNCHECKED)
    try:
        async with Store.open(backend, name=SERVICE) as store:
            yield AllocatorStore(store, guard, boot_id)
    finally:
        guard.witness.close()


@asynccontextmanager
async def open_shared_store(url: SecretUrl, term: Term, boot_id: str) -> AsyncGenerator[AllocatorStore]:
    """Open the state in PostgreSQL for a term, or create it.

    FailedPreconditionError if it has another version or a damaged row; it stays as it is.
    """
    from gpuscale.common.store.postgres import Postgres

    backend = Postgres(url, SERVICE, schema.Table.metadata, schema.VERSION, MIGRATIONS, term)
    async with Store.open(backend, name=SERVICE) as store:
        await store.read(partial(integrity.check_seals, tables=schema.Table.metadata.sorted_tables))
        of_reservations = select(func.coalesce(func.max(_RESERVATION.c.write_number), 0)).where(schema.KEPT)

        def last_write(connection: Connection) -> int:
            highest: int = connection.execute(of_reservations).scalar_one()
            return max(highest, count(connection, {integrity.LAST_WRITE: 0})[integrity.LAST_WRITE])

        yield AllocatorStore(store, integrity.Numbering(await store.read(last_write)), boot_id)
