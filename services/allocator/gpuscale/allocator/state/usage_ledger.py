"""The usage ledger: GPU time granted and used, kept for years in a table of the allocator's state.

A row is the use of one GPU by one reservation on a UTC day, or part of one. The rows of an end are written in its transaction,
those of live reservations at checkpoints; a finished row never changes, so a sum over rows is exact whatever is killed in
between. After ROLL_AFTER days the rows of a day are merged into one per user, tenant, labels, node and model: sums stay exact
to the millisecond, and what each reservation did is gone.

`granted`, `busy` and `idle` are milliseconds x thousandths of a GPU: microseconds of a whole one. Rows carry no checksum: they
decide nothing, and are too many to read at each start.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from sqlalchemy import Connection, Index, and_, delete, func, select
from sqlmodel import Field

from gpuscale.allocator.domain.accounting import Account, Hardware, Tally
from gpuscale.allocator.domain.durations import LEARNED
from gpuscale.allocator.domain.model import WHOLE, Reservation, ReservedGpu
from gpuscale.allocator.state.schema import Table
from gpuscale.allocator.state.store import AllocatorStore
from gpuscale.common.store.sqlite_store import give_back
from gpuscale.common.store.store import Prepared, Whole

ROLL_AFTER = 90
"""Days after which rows of single reservations are merged."""
SLICE = 500
"""Reservations whose rows one transaction merges."""
MOST_LASTED = 10_000
"""Reservations whose durations are read."""
MOST_ROLLED = 1000
"""Most rows that result; if labels would make more, they are dropped."""


class Usage(Table, table=True):
    """A row. `until_ms` is where the account stood, on the boot clock of `boot_id`; `outcome`, in the last row, how it ended.

    Merged rows have no reservation, GPU and holder. `ends` counts reservations that ended.
    """

    __table_args__ = Index("usage_by_day", "day"), {"sqlite_with_rowid": False}  # as for holds

    reservation_id: str = Field(primary_key=True)
    part: int = Field(primary_key=True, sa_type=Whole)
    gpu_uuid: str = Field(primary_key=True)
    day: int = Field(sa_type=Whole)
    owner: str
    tenant: str
    holder: str
    labels: str
    node: str
    model: str
    milli: int = Field(sa_type=Whole)
    granted: int = Field(sa_type=Whole)
    busy: int = Field(sa_type=Whole)
    idle: int = Field(sa_type=Whole)
    read: int = Field(sa_type=Whole)
    utilization: float
    peak_utilization: float | None
    peak_memory: int | None = Field(sa_type=Whole)
    energy: float | None
    ends: int = Field(sa_type=Whole)
    outcome: str
    until_ms: int = Field(sa_type=Whole)
    boot_id: str
    hardware: str  # JSON; {} where it was not read, and in merged rows


_USAGE = Table.metadata.tables["usage"]
_PUT = Prepared.replacing(_USAGE)
Work: TypeAlias = Callable[[Connection], object]
_Row: TypeAlias = dict[str, Any]
Rows: TypeAlias = list[_Row]
DIMENSIONS = ("owner", "tenant", "labels", "node", "model")
SUMS = ("granted", "busy", "idle", "read", "utilization", "energy", "ends")
PEAKS = ("peak_utilization", "peak_memory")
_TIMES = ("granted", "busy", "idle", "read", "utilization")
_UNREAD = Hardware()
_NEVER = {**dict.fromkeys(_TIMES[1:], "0"), **dict.fromkeys((*PEAKS, "energy"), "NULL")}
_PUT_UNREAD = Prepared.replacing(_USAGE, {**_NEVER, "boot_id": "''", "hardware": "'{}'"})
"""For a GPU that was never read: what is the same of each is part of the statement."""


@dataclass(frozen=True, slots=True)
class Used:
    """Use by one user, tenant, set of labels, node and model, empty if not asked for; tally times are x thousandths."""

    owner: str
    tenant: str
    labels: Mapping[str, str]
    node: str
    model: str
    tally: Tally
    ends: int

    def plus(self, other: "Used") -> "Used":
        """The sum of both."""
        return replace(self, tally=self.tally.plus(other.tally), ends=self.ends + other.ends)


def rows_of(account: Account, boot_id: str, outcome: str = "") -> Rows:
    """The rows of an account; with an `outcome`, its last ones."""
    one, first = account.reservation, {gpu.uuid: gpu for gpu in reversed(account.reservation.gpus)}
    found: Rows = []
    for entry in account.entries:
        last = entry is account.entries[-1]
        for nth, (uuid, tally) in enumerate(entry.gpus.items()):
            milli = account.milli[uuid]
            row = _row(one, first[uuid], milli, entry.part, entry.day, account.until)
            row |= {name: getattr(tally, name) * milli for name in _TIMES}
            row |= {name: getattr(tally, name) for name in (*PEAKS, "energy")}
            row["ends"], row["outcome"] = int(bool(outcome and last and not nth)), outcome if last else ""
            row["boot_id"] = boot_id if last and not outcome else ""
            row["hardware"] = "{}" if tally.hardware == _UNREAD else json.dumps(asdict(tally.hardware))
            found.append(row)
    return found


def unread_rows(one: Reservation, part: int, day: int, piece: int, until: int, outcome: str) -> Rows:
    """The only rows, `unread`, of a reservation that ended with this `outcome` after a piece of a day, its GPUs never read."""
    found: Rows = []
    for gpu in one.gpus:
        row = _row(one, gpu, gpu.milli, part, day, until)
        row["granted"], row["ends"], row["outcome"] = piece * gpu.milli, 0 if found else 1, outcome
        found.append(row)
    return found


def _row(one: Reservation, gpu: ReservedGpu, milli: int, part: int, day: int, until: int) -> _Row:
    """The columns of a row that tell of the reservation and the GPU."""
    row: _Row = {"reservation_id": one.id, "part": part, "gpu_uuid": gpu.uuid, "day": day, "milli": milli}
    row["owner"], row["tenant"], row["holder"] = one.owner, one.tenant, one.holder
    row["node"], row["model"], row["until_ms"] = gpu.node, gpu.model, until
    row["labels"] = json.dumps(dict(sorted(one.labels.items())), ensure_ascii=False) if one.labels else "{}"
    return row


def putting(rows: Sequence[Mapping[str, object]], unread: Sequence[Mapping[str, object]] = ()) -> Work:
    """A work that writes rows."""
    if not (rows and unread):
        return partial((_PUT_UNREAD if unread else _PUT).run, rows=unread or rows)
    return lambda connection: (_PUT.run(connection, rows), _PUT_UNREAD.run(connection, unread))


def tally_of(row: Mapping[str, Any]) -> Tally:
    """The tally of a row of one GPU."""
    whole = {name: row[name] // row["milli"] for name in ("granted", "busy", "idle", "read")}
    rest = {name: row[name] for name in ("peak_utilization", "peak_memory", "energy")}
    hardware = Hardware(**json.loads(row["hardware"]))
    return Tally(**whole, utilization=row["utilization"] / row["milli"], **rest, hardware=hardware)


@dataclass(eq=False)
class UsageLedger:
    """Reads and writes the table. Every method raises like `Store.write` and `Store.read`."""

    store: AllocatorStore

    async def standings(self, ids: Sequence[str]) -> dict[str, Any]:
        """The `part`, `until_ms` and `boot_id` of the last row of these reservations, if anything of them was written."""
        columns = (_USAGE.c.reservation_id, _USAGE.c.part, _USAGE.c.until_ms, _USAGE.c.boot_id)
        query = select(*columns).order_by(_USAGE.c.part)
        some = (ids[start : start + SLICE] for start in range(0, len(ids), SLICE))
        queries = [query.where(_USAGE.c.reservation_id.in_(part)) for part in some]
        rows = await self.store.read(lambda one: [row for query in queries for row in one.execute(query)])
        return {row.reservation_id: row for row in rows}

    async def put(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Write rows, but not into the space that a full disk reserves for ends of reservations."""
        if rows and not self.store.short:
            await self.store.change(putting(rows))

    async def lasted(self, since: int) -> list[tuple[str, str, int, int, float]]:
        """Owner, tenant, number of GPUs, thousandths of each, and milliseconds of reservations to learn from.

        The newest MOST_LASTED that ended on a day from `since` on, oldest first.
        """
        count, last = func.count(_USAGE.c.gpu_uuid.distinct()), func.max(_USAGE.c.day)
        millis = func.sum(_USAGE.c.granted * 1.0 / _USAGE.c.milli) / count
        query = (
            select(_USAGE.c.owner, _USAGE.c.tenant, count, func.max(_USAGE.c.milli), millis)
            .where(_USAGE.c.day >= since, _USAGE.c.reservation_id != "")
            .group_by(_USAGE.c.reservation_id, _USAGE.c.owner, _USAGE.c.tenant)
            .having(func.max(_USAGE.c.outcome).in_([str(one) for one in LEARNED]))
            .order_by(last.desc())
            .limit(MOST_LASTED)
        )
        rows = await self.store.read(lambda connection: connection.execute(query).all())
        return [(row[0], row[1], row[2], row[3], float(row[4])) for row in reversed(rows)]

    async def of_reservation(self, reservation_id: str) -> list[dict[str, Any]]:
        """All rows of a reservation."""
        query = select(_USAGE).where(_USAGE.c.reservation_id == reservation_id).order_by(_USAGE.c.part)
        rows = await self.store.read(lambda connection: connection.execute(query).mappings().all())
        return [{str(name): value for name, value in row.items()} for row in rows]

    async def query(self, since: int, until: int, dimensions: Collection[str]) -> list[Used]:
        """What was used from day `since` to before `until`, by some of the DIMENSIONS."""
        keys = [_USAGE.c[name] for name in DIMENSIONS if name in dimensions]
        query = select(*keys, *_added()).where(_USAGE.c.day >= since, _USAGE.c.day < until).group_by(*keys)
        rows = await self.store.read(lambda connection: connection.execute(query).mappings().all())
        found: list[Used] = []
        for row in rows:
            if row["granted"] is not None:
                words: dict[str, Any] = {name: row.get(name, "") for name in DIMENSIONS}
                words["labels"] = json.loads(words["labels"] or "{}")
                numbers = {**_sums(row), **{name: row[name] for name in PEAKS}}
                found.append(Used(**words, ends=numbers.pop("ends"), tally=Tally(**numbers)))
        return found

    async def tidy(self, today: int, keep_days: int) -> None:
        """Merge old rows, and drop the oldest day if it is past the retention.

        At most one day goes at a time: a clock that was wrong for an hour must not cost years.
        """
        while await self.store.change(lambda connection: _roll(connection, today - ROLL_AFTER)):
            pass
        oldest = select(func.min(_USAGE.c.day))
        day = await self.store.read(lambda connection: connection.execute(oldest).scalar())
        if day is not None and day < today - keep_days:
            old = delete(_USAGE).where(_USAGE.c.day == day)
            await self.store.change(lambda connection: connection.execute(old).rowcount)


def _added() -> list[Any]:
    kinds = ((func.sum, SUMS), (func.max, PEAKS))
    return [of(_USAGE.c[name]).label(name) for of, names in kinds for name in names]


def _sums(row: Mapping[Any, Any]) -> dict[str, Any]:
    """The sums of a row; PostgreSQL returns sums of integers as decimals."""
    return {name: row[name] if name in {"utilization", "energy"} else int(row[name]) for name in SUMS}


def _roll(connection: Connection, before: int) -> int:
    """Merge some reservations of the oldest day before `before`; returns how many."""
    single = _USAGE.c.reservation_id != ""
    oldest = select(func.min(_USAGE.c.day)).where(single, _USAGE.c.day < before)
    day = connection.execute(oldest).scalar()
    if day is None:
        return 0
    some = select(_USAGE.c.reservation_id).where(single, _USAGE.c.day == day).distinct().limit(SLICE)
    ids = connection.execute(some).scalars().all()
    chosen = and_(_USAGE.c.day == day, _USAGE.c.reservation_id.in_(ids))
    rows: Sequence[Any] = ()
    for names in (DIMENSIONS, [name for name in DIMENSIONS if name != "labels"]):
        keys = [_USAGE.c[name] for name in names]
        added = select(*keys, *_added()).where(chosen).group_by(*keys)
        rows = connection.execute(added).mappings().all()
        if len(rows) <= MOST_ROLLED:
            break
    last = select(func.coalesce(func.max(_USAGE.c.part), 0)).where(_USAGE.c.reservation_id == "")
    part: int = connection.execute(last).scalar_one()
    texts = dict.fromkeys(("reservation_id", "gpu_uuid", "holder", "outcome", "boot_id"), "")
    rest = {**texts, "day": day, "labels": "{}", "hardware": "{}", "milli": WHOLE, "until_ms": 0}
    _PUT.run(
        connection, [{**rest, **row, **_sums(row), "part": part + nth} for nth, row in enumerate(rows, 1)]
    )
    connection.execute(delete(_USAGE).where(chosen))
    give_back(connection)
    return len(ids)
