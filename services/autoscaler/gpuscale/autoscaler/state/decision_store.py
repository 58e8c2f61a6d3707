"""Decisions on disk. Decisions in a row that say the same are one row with a count. See `store`.

How often the last decision of an endpoint was taken stands in a small row of its own, which is written again and again,
until another decision follows: the row of the decision is a hundred times as large.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Executable, RowMapping
from sqlmodel import Field, SQLModel, col, delete, insert, select, update

from gpuscale.autoscaler.state.store import Connection, moment
from gpuscale.common.store.schema import Whole

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


class RepetitionRow(SQLModel, table=True):
    """How often the last decision of an endpoint was taken by now, and when last."""

    endpoint: str = Field(primary_key=True)
    decision: int = Field(sa_type=Whole)
    count: int = Field(sa_type=Whole)
    last_time: float


@dataclass(frozen=True, slots=True)
class Times:
    """How often a decision was taken, and when last."""

    decision: int
    count: int
    last_time: datetime


@dataclass(frozen=True, slots=True)
class StoredDecision:
    """A decision as it is stored: how often it was taken, when first, and when last."""

    id: int
    endpoint: str
    body: bytes
    count: int
    create_time: datetime
    last_time: datetime


def last(connection: Connection, endpoint: str) -> tuple[str, Times] | None:
    """What the last decision of an endpoint says, as its sameness, and how often it was taken."""
    id_ = col(DecisionRow.id)
    columns = (id_, col(DecisionRow.sameness), col(DecisionRow.count), col(DecisionRow.last_time))
    own = select(*columns).where(col(DecisionRow.endpoint) == endpoint).order_by(id_.desc()).limit(1)
    row = connection.execute(own).mappings().one_or_none()
    if row is None:
        return None
    kept = _repetition(connection, endpoint)
    again = kept if kept is not None and kept["decision"] == row["id"] else row
    return row["sameness"], Times(row["id"], again["count"], moment(again["last_time"]))


def add(connection: Connection, endpoint: str, sameness: str, body: bytes, wall: datetime) -> int:
    """Add a decision that says something new; returns its id."""
    time = wall.timestamp()
    row: Mapping[str, Any] = {"endpoint": endpoint, "sameness": sameness, "body": body, "count": 1}
    added = connection.execute(insert(DecisionRow).values(**row, create_time=time, last_time=time))
    _prune(connection, endpoint)
    (key,) = added.inserted_primary_key or (0,)
    return int(key)


def settle(connection: Connection, endpoint: str, times: Times | None = None, body: bytes = b"") -> None:
    """Complete the row of a decision before another follows: as `times` and `body` say, else as its small row does."""
    kept = _repetition(connection, endpoint)
    if kept is not None:
        known = {"count": kept["count"], "last_time": kept["last_time"]}
        connection.execute(update(DecisionRow).where(col(DecisionRow.id) == kept["decision"]).values(known))
        _remove_repetition(connection, endpoint)
    if times is not None:
        said = {"count": times.count, "last_time": times.last_time.timestamp(), "body": body}
        connection.execute(update(DecisionRow).where(col(DecisionRow.id) == times.decision).values(said))


def save_times(connection: Connection, every: Mapping[str, Times]) -> None:
    """Keep how often the last decisions of endpoints were taken; one that is not the last any more is left out."""
    for endpoint, times in every.items():
        if decision_ids(connection, endpoint, None, 1) == [times.decision]:
            _remove_repetition(connection, endpoint)
            values = {"decision": times.decision, "count": times.count}
            time = times.last_time.timestamp()
            connection.execute(insert(RepetitionRow).values(endpoint=endpoint, last_time=time, **values))


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
    return _decisions(connection, query)


def latest(connection: Connection, endpoint: str) -> StoredDecision | None:
    """The last decision of an endpoint."""
    own = select(DecisionRow).where(col(DecisionRow.endpoint) == endpoint)
    return next(iter(_decisions(connection, own.order_by(col(DecisionRow.id).desc()).limit(1))), None)


def remove_decisions(connection: Connection, endpoint: str) -> None:
    """Forget all decisions of an endpoint."""
    connection.execute(delete(DecisionRow).where(col(DecisionRow.endpoint) == endpoint))
    _remove_repetition(connection, endpoint)


def _repetition(connection: Connection, endpoint: str) -> RowMapping | None:
    own = select(RepetitionRow).where(col(RepetitionRow.endpoint) == endpoint)
    return connection.execute(own).mappings().one_or_none()


def _remove_repetition(connection: Connection, endpoint: str) -> None:
    connection.execute(delete(RepetitionRow).where(col(RepetitionRow.endpoint) == endpoint))


def _prune(connection: Connection, endpoint: str) -> None:
    id_ = col(DecisionRow.id)
    own = select(id_).where(col(DecisionRow.endpoint) == endpoint).order_by(id_.desc())
    connection.execute(delete(DecisionRow).where(id_.in_(own.offset(KEPT))))


def _decisions(connection: Connection, query: Executable) -> list[StoredDecision]:
    rows = connection.execute(query).mappings().all()
    own = select(RepetitionRow).where(col(RepetitionRow.endpoint).in_({row["endpoint"] for row in rows}))
    again = {row["decision"]: row for row in connection.execute(own).mappings()}
    return [_decision(row, again.get(row["id"], row)) for row in rows]


def _decision(row: RowMapping, times: RowMapping) -> StoredDecision:
    return StoredDecision(
        id=row["id"],
        endpoint=row["endpoint"],
        body=row["body"],
        count=times["count"],
        create_time=moment(row["create_time"]),
        last_time=moment(times["last_time"]),
    )
