"""Schema of the allocator's state: its tables, and reservations as rows of them. Table names are the class names."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic_core import to_json
from sqlalchemy import JSON, Connection, Index, event, text
from sqlalchemy.orm import registry
from sqlmodel import Field, SQLModel

from gpuscale.allocator.domain import model
from gpuscale.allocator.state import integrity as sealing
from gpuscale.common.store.schema import Whole

VERSION = 5
FENCE = "fence"
"""The counter that keeps the highest fence when records are forgotten."""
LEASE_KEY = "lease_key"
"""The counters that keep the key of lease tokens are named so, with their number behind."""
ROWS = "rows"
"""The counter of the rows of reservations and holds: one that was deleted by hand is missed at the next start."""

ENDED_RECORDS = "ended_records"
ENDED_BYTES = "ended_bytes"
"""The counters of the rows of `Ended`."""


class Table(SQLModel, registry=registry()):
    """A table of this state, apart from those of other services in the process."""


class _Record(Table):
    """What is stored of a reservation.

    `deadline_seconds` and `revoke_seconds` are of CLOCK_BOOTTIME and mean something only within `boot_id`; `create_time`
    and `end_time` are seconds since 1970. `write_number` is that of the write that made the row what it is
    (`gpuscale.allocator.state.integrity`); the sums are those of `gpuscale.allocator.state.integrity`.
    """

    id: str
    fence: int = Field(sa_type=Whole)
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


class Reservation(_Record, table=True):
    """A reservation that lives, or ended not long ago."""

    id: str = Field(primary_key=True)
    fence: int = Field(unique=True, sa_type=Whole)


class Ended(_Record, table=True):
    """A reservation that ended, and is not in memory any more. `gpuscale.allocator.state.archive` moves it here."""

    __table_args__ = (
        Index("ended_by_deadline", "boot_id", "deadline_seconds"),
        Index("ended_by_holder", "holder", "fence"),
        Index("ended_by_id", "id"),
    )

    fence: int = Field(primary_key=True, sa_type=Whole, sa_column_kwargs={"autoincrement": False})


class Hold(Table, table=True):
    """What a live reservation holds of a GPU, in thousandths of it; all its members together.

    The database itself refuses a second reservation of a GPU that is held whole (a unique index), and shares that
    exceed the GPU (a trigger).
    """

    gpu_uuid: str = Field(primary_key=True)
    reservation_id: str = Field(foreign_key="reservation.id", primary_key=True, index=True)
    milli: int = Field(default=model.WHOLE, sa_type=Whole)


_HOLD = Table.metadata.tables["hold"]
_IS_WHOLE = text(f"milli = {model.WHOLE}")
WHOLE_INDEX = Index(
    "one_whole_hold", _HOLD.c.gpu_uuid, unique=True, sqlite_where=_IS_WHOLE, postgresql_where=_IS_WHOLE
)
_SHARES_TRIGGER = (
    "CREATE TRIGGER shares_fit BEFORE INSERT ON hold"
    " WHEN NEW.milli + (SELECT coalesce(sum(milli), 0) FROM hold WHERE gpu_uuid = NEW.gpu_uuid) > 1000"
    " BEGIN SELECT RAISE(ABORT, 'the GPU is held already'); END"
)
_SHARES_FUNCTION = (
    "CREATE FUNCTION shares_fit() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
    " IF NEW.milli + (SELECT coalesce(sum(milli), 0) FROM hold WHERE gpu_uuid = NEW.gpu_uuid) > 1000"
    " THEN RAISE EXCEPTION 'the GPU is held already' USING ERRCODE = 'check_violation'; END IF;"
    " RETURN NEW; END $$"
)
_SHARES_TRIGGER_OF_FUNCTION = (
    "CREATE TRIGGER shares_fit BEFORE INSERT ON hold FOR EACH ROW EXECUTE FUNCTION shares_fit()"
)
_SHARES_GUARDS = {
    "sqlite": (_SHARES_TRIGGER,),
    "postgresql": (_SHARES_FUNCTION, _SHARES_TRIGGER_OF_FUNCTION),
}


def guard_shares(_target: object, connection: Connection, **_: object) -> None:
    """Make the trigger; called when the table is made."""
    for statement in _SHARES_GUARDS[connection.dialect.name]:
        connection.exec_driver_sql(statement)


event.listen(_HOLD, "after_create", guard_shares)


class Rank(Table, table=True):
    """A node's place in the order in which nodes were first seen."""

    node: str = Field(primary_key=True)
    rank: int = Field(unique=True, sa_type=Whole)
    checksum: int = Field(default=0, sa_type=Whole)


class Counter(Table, table=True):
    """A number that must not go back; and the parts of the key of lease tokens, which must not be lost.

    As counters they need no other version of the schema.
    """

    name: str = Field(primary_key=True)
    value: int = Field(sa_type=Whole)
    checksum: int = Field(default=0, sa_type=Whole)


def to_row(reservation: model.Reservation, boot_id: str, number: int) -> dict[str, object]:
    """The row of a reservation, as the driver takes it and returns it: lists and mappings as JSON."""
    row = to_lasting(reservation)
    row["lasting_sum"] = sealing.total(row.values())
    row.update(to_changes(reservation, boot_id, number))
    return row


def to_lasting(reservation: model.Reservation) -> dict[str, object]:
    """What does not change in the life of a reservation, unless a GPU of it is lost: the columns of `sealing.LASTING`."""
    return {
        "id": reservation.id,
        "fence": reservation.fence,
        "request_id": reservation.request_id,
        "fingerprint": reservation.fingerprint,
        "holder": reservation.holder,
        "owner": reservation.owner,
        # Spelled alike in every version: the sum of a row that lost a GPU is made anew, these are not written then.
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
    """What changes in the life of a reservation with the write of this number: the columns of `sealing.LIFE`, and a sum."""
    revoke_at = reservation.revoke_at
    row: dict[str, object] = {
        "id": reservation.id,
        "state": str(reservation.state),
        "ttl_seconds": float(reservation.ttl),
        "deadline_seconds": float(reservation.deadline),
        "boot_id": boot_id,
        "end_time": reservation.ended.timestamp() if reservation.ended else None,
        "revoke_seconds": None if revoke_at is None else float(revoke_at),
        "end_reason": reservation.end_reason,
        "write_number": number,
    }
    row["life_sum"] = sealing.total(row.values())
    return row


def to_lost(reservation: model.Reservation) -> dict[str, object]:
    """What changes beside its life in a reservation of which a GPU is lost, as columns, with their sum."""
    row = to_lasting(reservation)
    return {"id": reservation.id, "gpus": row["gpus"], "lasting_sum": sealing.total(row.values())}


def to_gpus(reservation: model.Reservation) -> str:
    """The GPUs of a reservation, as JSON."""
    return to_json([_from_gpu(gpu) for gpu in reservation.gpus]).decode()


def to_holds(reservation: model.Reservation) -> Sequence[dict[str, object]]:
    """What a live reservation holds: a row for each GPU."""
    held: dict[str, int] = {}
    for gpu in reservation.gpus:
        held[gpu.uuid] = held.get(gpu.uuid, 0) + gpu.milli
    return [
        {"gpu_uuid": uuid, "reservation_id": reservation.id, "milli": milli} for uuid, milli in held.items()
    ]


def from_row(row: Any) -> model.Reservation:
    """The reservation of a row of `Reservation` or `Ended`; its lists and mappings are no JSON any more."""
    return model.Reservation(
        id=row.id,
        fence=row.fence,
        request_id=row.request_id,
        fingerprint=row.fingerprint,
        holder=row.holder,
        owner=row.owner,
        labels=row.labels,
        policy=model.Policy(row.policy),
        gpus=tuple(_to_gpu(gpu) for gpu in row.gpus),
        ttl=row.ttl_seconds,
        state=model.State(row.state),
        deadline=row.deadline_seconds,
        created=datetime.fromtimestamp(row.create_time, UTC),
        ended=None if row.end_time is None else datetime.fromtimestamp(row.end_time, UTC),
        tenant=row.tenant,
        priority=row.priority,
        preemptible=row.preemptible,
        cpu_milli=row.cpu_milli,
        host_memory_bytes=row.host_memory_bytes,
        member_count=row.member_count,
        revoke_at=row.revoke_seconds,
        end_reason=row.end_reason,
    )


def _from_gpu(gpu: model.ReservedGpu) -> dict[str, object]:
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
    return row


def _to_gpu(row: Mapping[str, Any]) -> model.ReservedGpu:
    parts = tuple(model.ScorePart(*part) for part in row["parts"])
    return model.ReservedGpu(
        node=row["node"],
        uuid=row["uuid"],
        index=row["index"],
        model=row["model"],
        simulated=row["simulated"],
        score=model.Score(row["score"], parts, row["note"]),
        # Rows of schema version 1 knew whole GPUs only.
        milli=row.get("milli", model.WHOLE),
        memory_bytes=row.get("memory"),
        member=row.get("member", 0),
        lost=row.get("lost", False),
        parent=row.get("parent", ""),
    )
