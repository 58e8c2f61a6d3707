"""Schema of the allocator's state: its tables, and reservations as rows of them. Table names are the class names."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON
from sqlalchemy.orm import registry
from sqlmodel import Field, SQLModel

from gpuscale.allocator import model

VERSION = 1
FENCE = "fence"
"""The counter that keeps the highest fence when records are forgotten."""


class Table(SQLModel, registry=registry()):
    """A table of this state, apart from those of other services in the process."""


class Reservation(Table, table=True):
    """A reservation, live or ended.

    `deadline_seconds` is of CLOCK_BOOTTIME and means something only within `boot_id`; `create_time` and `end_time` are
    seconds since 1970.
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


class Hold(Table, table=True):
    """A GPU that a live reservation holds."""

    gpu_uuid: str = Field(primary_key=True)
    reservation_id: str = Field(foreign_key="reservation.id", index=True)


class Rank(Table, table=True):
    """A node's place in the order in which nodes were first seen."""

    node: str = Field(primary_key=True)
    rank: int = Field(unique=True)


class Counter(Table, table=True):
    """A number that must not go back."""

    name: str = Field(primary_key=True)
    value: int


def to_row(reservation: model.Reservation, boot_id: str) -> dict[str, object]:
    """The row of a reservation."""
    return {
        "id": reservation.id,
        "fence": reservation.fence,
        "request_id": reservation.request_id,
        "fingerprint": reservation.fingerprint,
        "holder": reservation.holder,
        "owner": reservation.owner,
        "labels": dict(reservation.labels),
        "policy": reservation.policy.value,
        "gpus": [_from_gpu(gpu) for gpu in reservation.gpus],
        "state": reservation.state.value,
        "ttl_seconds": reservation.ttl,
        "deadline_seconds": reservation.deadline,
        "boot_id": boot_id,
        "create_time": reservation.created.timestamp(),
        "end_time": reservation.ended.timestamp() if reservation.ended else None,
    }


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
    )
