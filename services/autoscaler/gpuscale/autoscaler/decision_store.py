"""Decisions on disk. Decisions in a row that say the same are one row with a count. See `store`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import RowMapping
from sqlmodel import Field, SQLModel, col, delete, insert, select, update

from gpuscale.autoscaler.state.store import Connection, moment
from gpuscale.common.store.columns import Whole

KEPT: Final = 1_000
"""Decisions that are kept of each endpoint."""


class DecisionRow(SQLModel, table=True):
    """A decision; `sameness` tells whether the next one says the same, `body` is the message but for name and times."""

    __table_args__ = {"sqlite_autoincrement": True}

    id: int | None = Field(default=None, primary_key=True, sa_type=Whole)
    endpoint: str = Field(index=True)
    sameness: str
    body: bytes
    count: int = Field(sa_type=Whole)
    create_time: float
    last_time: float


@dataclass(frozen=True, slots=True)
class StoredDecision:
    """A decision as it is stored: how often it was taken, when first, and when last."""

    id: int
    endpoint: str
    body: bytes
    count: int
    create_time: datetime
    last_time: datetime


def record(connection: Connection, endpoint: str, sameness: str, body: bytes, wall: datetime) -> int:
    """Count the decision to the last one of the endpoint if that says the same, else add it; returns its id."""
    time = wall.timestamp()
    id_ = col(DecisionRow.id)
    own = select(DecisionRow).where(col(DecisionRow.endpoint) == endpoint).order_by(id_.desc())
    last = connection.execute(own.limit(1)).mappings().one_or_none()
    if last is not None and last["sameness"] == sameness:
        repeated: Mapping[str, Any] = {"body": body, "last_time": time, "count": last["count"] + 1}
        connection.execute(update(DecisionRow).where(id_ == last["id"]).values(repeated))
        return int(last["id"])
    row: Mapping[str, Any] = {"endpoint": endpoint, "sameness": sameness, "body": body, "count": 1}
    added = connection.execute(insert(DecisionRow).values(**row, create_time=time, last_time=time))
    _prune(connection, endpoint)
    (key,) = added.inserted_primary_key or (0,)
    return int(key)


def amend(connection: Connection, decision_id: int, sameness: str, body: bytes) -> None:
    """Complete a decision that was recorded before it was acted on."""
    own = update(DecisionRow).where(col(DecisionRow.id) == decision_id)
    connection.execute(own.values(sameness=sameness, body=body))


def decision(connection: Connection, endpoint: str, decision_id: int) -> StoredDecision | None:
    """One decision of an endpoint."""
    found = (one for one in decisions(connection, [decision_id]) if one.endpoint == endpoint)
    return next(found, None)


def decision_ids(connection: Connection, endpoint: str, below: int | None, most: int) -> list[int]:
    """Ids of at most so many decisions of one endpoint, or of all where it is empty, below an id; newest first."""
    query = select(col(DecisionRow.id)).order_by(col(DecisionRow.id).desc()).limit(most)
    if endpoint:
        query = query.where(col(DecisionRow.endpoint) == endpoint)
    if below is not None:
        query = query.where(col(DecisionRow.id) < below)
    return [row["id"] for row in connection.execute(query).mappings()]


def decisions(connection: Connection, ids: Sequence[int]) -> list[StoredDecision]:
    """Decisions by id, newest first."""
    query = select(DecisionRow).where(col(DecisionRow.id).in_(ids)).order_by(col(DecisionRow.id).desc())
    return [_decision(row) for row in connection.execute(query).mappings()]


def latest(connection: Connection, endpoint: str) -> StoredDecision | None:
    """The last decision of an endpoint."""
    id_ = col(DecisionRow.id)
    own = select(DecisionRow).where(col(DecisionRow.endpoint) == endpoint).order_by(id_.desc()).limit(1)
    row = connection.execute(own).mappings().one_or_none()
    return None if row is None else _decision(row)


def remove_decisions(connection: Connection, endpoint: str) -> None:
    """Forget all decisions of an endpoint."""
    connection.execute(delete(DecisionRow).where(col(DecisionRow.endpoint) == endpoint))


def _prune(connection: Connection, endpoint: str) -> None:
    id_ = col(DecisionRow.id)
    own = select(id_).where(col(DecisionRow.endpoint) == endpoint).order_by(id_.desc())
    connection.execute(delete(DecisionRow).where(id_.in_(own.offset(KEPT))))


def _decision(row: RowMapping) -> StoredDecision:
    return StoredDecision(
        id=row["id"],
        endpoint=row["endpoint"],
        body=row["body"],
        count=row["count"],
        create_time=moment(row["create_time"]),
        last_time=moment(row["last_time"]),
    )
