"""What operators set and users book, on disk in the allocator's state: cordons, quotas and bookings."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import to_json
from sqlalchemy import Connection, delete, select
from sqlmodel import Field

from gpuscale.allocator.domain import bookings, cordons
from gpuscale.allocator.domain.model import Ask
from gpuscale.allocator.queueing import model as queueing
from gpuscale.allocator.state.integrity import damaged, is_whole, sealed
from gpuscale.allocator.state.schema import Table
from gpuscale.allocator.state.store import AllocatorStore
from gpuscale.common.store.store import Prepared, Whole


class Cordon(Table, table=True):
    """A cordon. `deadline_seconds` is of CLOCK_BOOTTIME and only valid within `boot_id`."""

    node: str = Field(primary_key=True)
    gpu: str = Field(primary_key=True)
    reason: str
    author: str
    create_time: float
    deadline_seconds: float | None
    grace_seconds: float | None
    boot_id: str
    checksum: int = Field(default=0, sa_type=Whole)


_CORDON = Table.metadata.tables["cordon"]
_PUT_CORDON = Prepared.replacing(_CORDON)


@dataclass(eq=False)
class CordonStore:
    """Reads and writes cordons of the current boot. Every write returns once it is on disk, and raises like `Store.write`."""

    store: AllocatorStore
    boot_id: str

    async def load(self, now: float) -> tuple[list[cordons.Cordon], list[cordons.Cordon]]:
        """Every cordon: those of this boot, and those of an earlier one, whose deadlines restart."""
        rows = await self.store.read(lambda connection: connection.execute(select(_CORDON)).mappings().all())
        of_this_boot: list[cordons.Cordon] = []
        earlier: list[cordons.Cordon] = []
        for row in rows:
            cordon = cordons.Cordon(
                spot=cordons.Spot(row["node"], row["gpu"]),
                reason=row["reason"],
                author=row["author"],
                created=datetime.fromtimestamp(row["create_time"], UTC),
                deadline=row["deadline_seconds"],
                grace=row["grace_seconds"],
            )
            if row["boot_id"] == self.boot_id:
                of_this_boot.append(cordon)
            else:
                earlier.append(cordons.rebased(cordon, now))
        return of_this_boot, earlier

    async def save(self, marks: Sequence[cordons.Cordon]) -> None:
        """Write cordons, replacing those of the same spots."""
        rows = [
            sealed(
                {
                    "node": cordon.spot.node,
                    "gpu": cordon.spot.gpu,
                    "reason": cordon.reason,
                    "author": cordon.author,
                    "create_time": cordon.created.timestamp(),
                    "deadline_seconds": cordon.deadline,
                    "grace_seconds": cordon.grace,
                    "boot_id": self.boot_id,
                }
            )
            for cordon in marks
        ]
        await self.store.change(lambda connection: _PUT_CORDON.run(connection, rows))

    async def remove(self, spot: cordons.Spot) -> None:
        """Delete the cordon of a spot, if there is one."""
        gone = delete(_CORDON).where(_CORDON.c.node == spot.node, _CORDON.c.gpu == spot.gpu)
        await self.store.change(lambda connection: connection.execute(gone))


class Quota(Table, table=True):
    """The quota of a tenant."""

    tenant: str = Field(primary_key=True)
    gpu_milli_limit: int | None = Field(sa_type=Whole)
    weight: float
    checksum: int = Field(default=0, sa_type=Whole)


class MonthlyQuota(Table, table=True):
    """The monthly GPU-hours of a tenant with a limit: its own table, so that the schema version stays."""

    tenant: str = Field(primary_key=True)
    gpu_hours: float
    checksum: int = Field(default=0, sa_type=Whole)


_QUOTA, _MONTHLY = Table.metadata.tables["quota"], Table.metadata.tables["monthlyquota"]
_PUT_QUOTA, _PUT_MONTHLY = Prepared.replacing(_QUOTA), Prepared.replacing(_MONTHLY)


@dataclass(eq=False)
class QuotaStore:
    """Reads and writes quotas. Every write returns once it is on disk, and raises like `Store.write`."""

    store: AllocatorStore

    async def load(self) -> list[queueing.Quota]:
        """Every quota."""
        both = _QUOTA.outerjoin(_MONTHLY, _QUOTA.c.tenant == _MONTHLY.c.tenant)
        hours = _MONTHLY.c.gpu_hours.label("gpu_hours_per_month")
        columns = select(_QUOTA.c.tenant, _QUOTA.c.gpu_milli_limit, _QUOTA.c.weight, hours).select_from(both)
        rows = await self.store.read(lambda connection: connection.execute(columns).mappings().all())
        return [queueing.Quota(**row) for row in rows]

    async def save(self, quota: queueing.Quota) -> None:
        """Write a quota, replacing the tenant's earlier one."""
        row = sealed(
            {"tenant": quota.tenant, "gpu_milli_limit": quota.gpu_milli_limit, "weight": float(quota.weight)}
        )
        hours = quota.gpu_hours_per_month

        def work(connection: Connection) -> None:
            _PUT_QUOTA.run(connection, [row])
            connection.execute(delete(_MONTHLY).where(_MONTHLY.c.tenant == quota.tenant))
            if hours is not None:
                _PUT_MONTHLY.run(connection, [sealed({"tenant": quota.tenant, "gpu_hours": float(hours)})])

        await self.store.change(work)

    async def remove(self, tenant: str) -> None:
        """Delete the quota of a tenant, if there is one."""

        def work(connection: Connection) -> None:
            for table in (_QUOTA, _MONTHLY):
                connection.execute(delete(table).where(table.c.tenant == tenant))

        await self.store.change(work)


class Booking(Table, table=True):
    """A booking, in a table that needs no schema version. `ask` and `spots` are JSON; times are seconds since 1970."""

    id: str = Field(primary_key=True)
    request_id: str = Field(unique=True)
    fingerprint: str
    owner: str
    tenant: str
    title: str
    ask: str
    spots: str
    start_time: float
    end_time: float
    create_time: float
    state: str
    note: str
    checksum: int = Field(default=0, sa_type=Whole)


_BOOKING = Table.metadata.tables["booking"]
_PUT_BOOKING = Prepared.replacing(_BOOKING)
_TEXTS = ("id", "request_id", "fingerprint", "owner", "tenant", "title", "note")
_TIMES = {"start": "start", "end": "end", "created": "create"}
"""Columns of the same name as what they hold, and the first words of those of times."""
_ASK, _SPOTS = TypeAdapter(Ask), TypeAdapter(tuple[tuple[str, str], ...])


@dataclass(eq=False)
class BookingStore:
    """Reads and writes bookings. Every write returns once it is on disk, and raises like `Store.write`."""

    store: AllocatorStore

    async def load(self, horizon: float) -> bookings.Bookings:
        """Load every booking; STATE_INCONSISTENT if one is damaged."""
        rows: list[dict[str, Any]] = await self.store.read(
            lambda connection: [dict(row) for row in connection.execute(select(_BOOKING)).mappings()]
        )
        found = bookings.Bookings(horizon)
        for row in rows:
            if not is_whole(row):
                raise damaged(f"the stored booking {row['id']}")
            del row["checksum"]
            times = {name: row.pop(f"{column}_time") for name, column in _TIMES.items()}
            ask, spots = _ASK.validate_json(row.pop("ask")), _SPOTS.validate_json(row.pop("spots"))
            state = bookings.BookingState(row.pop("state"))
            found.put(bookings.Booking(**row, **times, ask=ask, spots=spots, state=state))
        return found

    async def save(self, one: bookings.Booking) -> None:
        """Write a booking, replacing its earlier value."""
        row: dict[str, object] = {name: getattr(one, name) for name in _TEXTS}
        row |= {f"{column}_time": float(getattr(one, name)) for name, column in _TIMES.items()}
        row |= {"state": str(one.state)} | {
            name: to_json(getattr(one, name)).decode() for name in ("ask", "spots")
        }
        await self.store.change(lambda connection: _PUT_BOOKING.run(connection, [sealed(row)]))

    async def remove(self, ids: Iterable[str]) -> None:
        """Delete bookings."""
        gone = delete(_BOOKING).where(_BOOKING.c.id.in_([*ids]))
        await self.store.change(lambda connection: connection.execute(gone))
