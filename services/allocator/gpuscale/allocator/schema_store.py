"""Schema of the allocator's state: its tables, and reservations as rows of them. Table names are the class names."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, Connection, Index, event, text
from sqlalchemy.orm import registry
from sqlmodel import Field, SQLModel

from gpuscale.allocator import model

VERSION = 2
FENCE = "fence"
"""The counter that keeps the highest fence when records are forgotten."""


class Table(SQLModel, registry=registry()):
    """A table of this state, apart from those of other services in the process."""


class Reservation(Table, table=True):
    """A reservation, live or ended.

    `deadline_seconds` and `revoke_seconds` are of CLOCK_BOOTTIME and mean something only within `boot_id`; `create_time`
    and `end_time` are seconds since 1970.
    """

    id: str = Field(primary_key=True)
    fence: int = Field(unique=True)
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
    priority: int = 0
    preemptible: bool = False
    cpu_milli: int = 0
    host_memory_bytes: int = 0
    member_count: int = 1
    revoke_seconds: float | None = None
    end_reason: str = ""


class Hold(Table, table=True):
    """What a live reservation holds of a GPU, in thousandths of it; all its members together.

    The database itself refuses a second reservation of a GPU that is held whole (a unique index), and shares that
    exceed the GPU (a trigger).
    """

    gpu_uuid: str = Field(primary_key=True)
    reservation_id: str = Field(foreign_key="reservation.id", primary_key=True, index=True)
    milli: int = model.WHOLE


_HOLD = Table.metadata.tables["hold"]
_IS_WHOLE = text(f"milli = {model.WHOLE}")
WHOLE_INDEX = Index("one_whole_hold", _HOLD.c.gpu_uuid, unique=True, sqlite_where=_IS_WHOLE)
_SHARES_TRIGGER = (
    "CREATE TRIGGER shares_fit BEFORE INSERT ON hold"
    " WHEN NEW.milli + (SELECT coalesce(sum(milli), 0) FROM hold WHERE gpu_uuid = NEW.gpu_uuid) > 1000"
    " BEGIN SELECT RAISE(ABORT, 'the GPU is held already'); END"
)


def guard_shares(_target: object, connection: Connection, **_: object) -> None:
    """Make the trigger; called when the table is made."""
    connection.exec_driver_sql(_SHARES_TRIGGER)


event.listen(_HOLD, "after_create", guard_shares)


class Rank(Table, table=True):
    """A node's place in the order in which nodes were first seen."""

    node: str = Field(primary_key=True)
    rank: int = Field(unique=True)


class Counter(Table, table=True):
    """A number that must not go back."""

    name: str = Field(primary_key=True)
    value: int


def to_row(reservation: model.Reservation, boot_id: str) -> dict[str, object]:
    """The row of a reservation, as the driver takes it: lists and mappings as JSON."""
    return {
        "id": reservation.id,
        "fence": reservation.fence,
        "request_id": reservation.request_id,
        "fingerprint": reservation.fingerprint,
        "holder": reservation.holder,
        "owner": reservation.owner,
        "labels": json.dumps(dict(reservation.labels)) if reservation.labels else "{}",
        "policy": reservation.policy.value,
        "create_time": reservation.created.timestamp(),
        "tenant": reservation.tenant,
        "priority": reservation.priority,
        "preemptible": reservation.preemptible,
        "cpu_milli": reservation.cpu_milli,
        "host_memory_bytes": reservation.host_memory_bytes,
        "member_count": reservation.member_count,
        "gpus": to_gpus(reservation),
        **to_changes(reservation, boot_id),
    }


def to_changes(reservation: model.Reservation, boot_id: str) -> dict[str, object]:
    """What changes in the life of a reservation, as columns. Its GPUs do so only where one is lost: `to_gpus`."""
    return {
        "state": reservation.state.value,
        "ttl_seconds": reservation.ttl,
        "deadline_seconds": reservation.deadline,
        "boot_id": boot_id,
        "end_time": reservation.ended.timestamp() if reservation.ended else None,
        "revoke_seconds": reservation.revoke_at,
        "end_reason": reservation.end_reason,
    }


def to_gpus(reservation: model.Reservation) -> str:
    """The GPUs of a reservation, as JSON."""
    return json.dumps([_from_gpu(gpu) for gpu in reservation.gpus])


def to_holds(reservation: model.Reservation) -> Sequence[dict[str, object]]:
    """What a live reservation holds: a row for each GPU."""
    held: dict[str, int] = {}
    for gpu in reservation.gpus:
        held[gpu.uuid] = held.get(gpu.uuid, 0) + gpu.milli
    return [
        {"gpu_uuid": uuid, "reservation_id": reservation.id, "milli": milli} for uuid, milli in held.items()
    ]


def from_row(row: Reservation) -> model.Reservation:
    """The reservation of a row."""
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
    return {
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
    )
