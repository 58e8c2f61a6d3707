"""Schema of the allocator's state: its tables and counters. Table names are the class names."""

from typing import Any

from sqlalchemy import JSON, CheckConstraint, Connection, event, text
from sqlalchemy import Table as SchemaTable
from sqlalchemy.orm import registry
from sqlmodel import Field, SQLModel

from gpuscale.allocator.domain import model
from gpuscale.common.store.store import Whole

VERSION = 9
FENCE = "fence"
"""The counter that keeps the highest fence when records are forgotten."""
LEASE_KEY = "lease_key"
"""Prefix of the counters of the lease-token key, followed by their number."""
ROWS = "rows"
"""The counter of rows that are not archived: it reveals rows that were deleted by hand at the next start. Holds must match them."""

ENDED_RECORDS = "ended_records"
ENDED_BYTES = "ended_bytes"
"""The counters of archived rows."""
FORGOTTEN = "forgotten"
"""The counter of when the youngest forgotten reservation ended, in seconds since 1970."""
KEPT, ARCHIVED = text("archived = 0"), text("archived = 1")
"""The rows that memory has, and those that it dropped. No parameters: partial indexes would not be used."""


class Table(SQLModel, registry=registry()):
    """A table of this state, apart from those of other services in the process."""


class Reservation(Table, table=True):
    """A reservation that is live or has ended; `archived` is 1 once it is no longer in memory (`gpuscale.allocator.state.archive`).

    `deadline_seconds` and `revoke_seconds` are of CLOCK_BOOTTIME and only valid within `boot_id`; `create_time` and `end_time`
    are seconds since 1970. `write_number` is the last write of the row and the sums are its checksums
    (`gpuscale.allocator.state.integrity`).
    """

    __table_args__ = (CheckConstraint(f"archived = 0 OR state <> '{model.State.ACTIVE.value}'"),)

    fence: int = Field(primary_key=True, sa_type=Whole, sa_column_kwargs={"autoincrement": False})
    id: str = Field(unique=True, index=True)
    request_id: str = Field(unique=True)
    fingerprint: str
    holder: str
    owner: str
    labels: dict[str, str] = Field(sa_type=JSON)
    policy: str
    gpus: list[dict[str, Any]] = Field(sa_type=JSON)
    state: str
    ttl_seconds: float
    deadline_seconds: float
    boot_id: str
    create_time: float
    end_time: float | None
    tenant: str = ""
    priority: int = Field(default=0, sa_type=Whole)
    preemptible: bool = False
    cpu_milli: int = Field(default=0, sa_type=Whole)
    host_memory_bytes: int = Field(default=0, sa_type=Whole)
    member_count: int = Field(default=1, sa_type=Whole)
    revoke_seconds: float | None = None
    end_reason: str = ""
    write_number: int = Field(default=0, sa_type=Whole)
    lasting_sum: int = Field(default=0, sa_type=Whole)
    life_sum: int = Field(default=0, sa_type=Whole)
    archived: int = Field(default=0, sa_type=Whole)


class Hold(Table, table=True):
    """What a live reservation holds of a GPU, in thousandths; all its members together.

    The database itself refuses a second reservation of a GPU that is held whole (a unique index), and shares that exceed the
    GPU (a trigger).
    """

    __table_args__ = {"sqlite_with_rowid": False}  # a page less in the log of each change

    gpu_uuid: str = Field(primary_key=True)
    reservation_id: str = Field(foreign_key="reservation.id", primary_key=True, index=True)
    milli: int = Field(default=model.WHOLE, sa_type=Whole)


# As text: an Index for both databases loads SQLAlchemy's support for both, 2 MB.
_PARTIAL_INDEXES = (
    f"CREATE INDEX reservation_kept ON reservation (fence) WHERE {KEPT}",
    f"CREATE INDEX archived_by_deadline ON reservation (boot_id, deadline_seconds) WHERE {ARCHIVED}",
    f"CREATE INDEX archived_by_holder ON reservation (holder, fence) WHERE {ARCHIVED}",
)
_WHOLE_INDEX = f"CREATE UNIQUE INDEX one_whole_hold ON hold (gpu_uuid) WHERE milli = {model.WHOLE}"
_SHARES_TRIGGER = (
    "CREATE TRIGGER shares_fit BEFORE INSERT ON hold"
    " WHEN NEW.milli + (SELECT coalesce(sum(milli), 0) FROM hold WHERE gpu_uuid = NEW.gpu_uuid) > 1000"
    " BEGIN SELECT RAISE(ABORT, 'the GPU is held already'); END"
)
_SHARES_FUNCTION = (
    "CREATE OR REPLACE FUNCTION shares_fit() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
    " IF NEW.milli + (SELECT coalesce(sum(milli), 0) FROM hold WHERE gpu_uuid = NEW.gpu_uuid) > 1000"
    " THEN RAISE EXCEPTION 'the GPU is held already' USING ERRCODE = 'check_violation'; END IF;"
    " RETURN NEW; END $$"
)
_SHARES_TRIGGER_OF_FUNCTION = (
    "CREATE TRIGGER shares_fit BEFORE INSERT ON hold FOR EACH ROW EXECUTE FUNCTION shares_fit()"
)
_GUARDS = {
    ("hold", "sqlite"): (_WHOLE_INDEX, _SHARES_TRIGGER),
    ("hold", "postgresql"): (_WHOLE_INDEX, _SHARES_FUNCTION, _SHARES_TRIGGER_OF_FUNCTION),
}


def guard(table: SchemaTable, connection: Connection, **_: object) -> None:
    """Create indexes and triggers of a table; called when it is created."""
    for statement in _GUARDS.get((table.name, connection.dialect.name), _PARTIAL_INDEXES):
        connection.exec_driver_sql(statement)


RESERVATION, HOLD = (Table.metadata.tables[name] for name in ("reservation", "hold"))
for _table in (RESERVATION, HOLD):
    event.listen(_table, "after_create", guard)


class Rank(Table, table=True):
    """A node's place in the order in which nodes were first seen."""

    node: str = Field(primary_key=True)
    rank: int = Field(unique=True, sa_type=Whole)
    checksum: int = Field(default=0, sa_type=Whole)


class Counter(Table, table=True):
    """A number that must not go back; and the parts of the lease-token key, which must not be lost.

    As counters they need no new schema version.
    """

    name: str = Field(primary_key=True)
    value: int = Field(sa_type=Whole)
    checksum: int = Field(default=0, sa_type=Whole)
