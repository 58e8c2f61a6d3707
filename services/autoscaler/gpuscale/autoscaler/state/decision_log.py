"""Decisions on disk. Equal consecutive decisions are one row with a count. See `store`.

The count of an endpoint's last decision is in a small row of its own, rewritten until another decision follows: the row of the
decision is a hundred times as large.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, Final, NamedTuple

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from sqlalchemy import Index, Integer, Select, bindparam, func, or_
from sqlmodel import Field, SQLModel, col, delete, insert, select, update

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain.decisions import Decision, sameness
from gpuscale.autoscaler.domain.engine import Question
from gpuscale.autoscaler.domain.inputs import Learnt
from gpuscale.autoscaler.state.store import Connection, EndpointRow, moment
from gpuscale.autoscaler.wire.decisions import decision_body, question_to_wire
from gpuscale.autoscaler.wire.specs import from_wire
from gpuscale.common.errors import GpuscaleError, NotFoundError
from gpuscale.common.filters import ListRequest, listed
from gpuscale.common.names import decision_name
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.store.store import Prepared, Store, Whole
from gpuscale.common.wire import ANY_TIME, TimeRange, page_limit
from gpuscale.internal.autoscaler import v1 as internal

KEPT: Final = 1_000
"""Decisions kept per endpoint."""
SEARCHED: Final = 5_000
"""Decisions that a page examines."""
KEPT_IN_ALL: Final = 200_000
"""Decisions kept in all, beside the last of each endpoint: about 100 MB."""
_RECALLED: Final = 20
"""Decisions that are searched for what rules learned: those between evaluations do not contain it."""
_LIMITED_BY_TEXT, _CODE_TEXT = 10, 5
"""Fields of Decision and DecisionStep in bodies stored before codes were enums."""


class DecisionRow(SQLModel, table=True):
    """A decision; equal `sameness` means a repetition, `body` is the message without name and times."""

    __table_args__ = (Index("decision_by_time", "create_time", "id"), {"sqlite_autoincrement": True})

    id: int | None = Field(default=None, primary_key=True, sa_type=Whole)
    endpoint: str = Field(index=True)
    sameness: str
    body: bytes
    count: int = Field(sa_type=Whole)
    create_time: float
    last_time: float


class RepetitionRow(SQLModel, table=True):
    """How often the last decision of an endpoint was taken so far, and when last."""

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
    """A stored decision: how often it was taken, when first, and when last."""

    id: int
    endpoint: str
    body: bytes
    count: int
    create_time: datetime
    last_time: datetime


class Last(NamedTuple):
    """The sameness of an endpoint's last decision, and how often it was taken."""

    sameness: str
    times: Times


_SAID = (col(DecisionRow.id), col(DecisionRow.sameness), col(DecisionRow.count), col(DecisionRow.last_time))
_NEWEST = select(func.max(col(DecisionRow.id))).where(col(DecisionRow.endpoint) == bindparam("key"))
_LAST = Prepared(
    select(*_SAID)
    .add_columns(col(RepetitionRow.count), col(RepetitionRow.last_time))
    .join(
        RepetitionRow,
        (col(RepetitionRow.endpoint) == col(DecisionRow.endpoint))
        & (col(RepetitionRow.decision) == col(DecisionRow.id)),
        isouter=True,
    )
    .where(col(DecisionRow.id) == _NEWEST.scalar_subquery())
)
_ID = Prepared(_NEWEST)
_NEW = ("endpoint", "sameness", "body", "count", "create_time", "last_time")
_ADD = Prepared(insert(DecisionRow).values({name: bindparam(name) for name in _NEW}))
_TIMES: Mapping[str, Any] = {"count": bindparam("count"), "last_time": bindparam("last_time")}
_TAKEN = update(DecisionRow).where(col(DecisionRow.id) == bindparam("key")).values(_TIMES)
_COUNT, _COMPLETE = Prepared(_TAKEN), Prepared(_TAKEN.values(body=bindparam("body")))
_OLD = (
    select(DecisionRow.id)
    .where(col(DecisionRow.endpoint) == bindparam("key"))
    .order_by(col(DecisionRow.id).desc())
    .offset(bindparam("kept", type_=Integer()))
)
_FORGET_OLD = Prepared(delete(DecisionRow).where(col(DecisionRow.id).in_(_OLD)))
_REPEATED = Prepared(
    select(col(RepetitionRow.decision), col(RepetitionRow.count), col(RepetitionRow.last_time)).where(
        col(RepetitionRow.endpoint) == bindparam("key")
    )
)
_REPEAT = Prepared.replacing(SQLModel.metadata.tables["repetitionrow"])
_FORGET_REPETITION = Prepared(delete(RepetitionRow).where(col(RepetitionRow.endpoint) == bindparam("key")))


def last(connection: Connection, endpoint: str) -> Last | None:
    """The last decision of an endpoint."""
    rows = _LAST.all(connection, {"key": endpoint})
    if not rows:
        return None
    id_, text, count, time, count_again, time_again = rows[0]
    if count_again is not None:
        count, time = count_again, time_again
    return Last(text, Times(id_, count, moment(time)))


def _settle(connection: Connection, endpoint: str, times: Times | None = None, body: bytes = b"") -> None:
    """Complete the row of a decision before another follows: by `times` and `body`, or from its small row."""
    for decision, count, last_time in _REPEATED.all(connection, {"key": endpoint}):
        _COUNT.run(connection, [{"key": decision, "count": count, "last_time": last_time}])
        _remove_repetition(connection, endpoint)
    if times is not None:
        said = {"count": times.count, "last_time": times.last_time.timestamp(), "body": body}
        _COMPLETE.run(connection, [{"key": times.decision, **said}])


def save_times(connection: Connection, every: Mapping[str, Times]) -> None:
    """Write how often the last decisions of endpoints were taken, ignoring ones that are no longer the last."""
    rows = [
        {**asdict(times), "endpoint": endpoint, "last_time": times.last_time.timestamp()}
        for endpoint, times in every.items()
        if _ID.first(connection, {"key": endpoint}) == (times.decision,)
    ]
    _REPEAT.run(connection, rows)


def find_decision(connection: Connection, endpoint: str, decision_id: int) -> StoredDecision | None:
    """One decision of an endpoint."""
    return next((one for one in decisions(connection, [decision_id]) if one.endpoint == endpoint), None)


def decision_ids(
    connection: Connection, endpoint: str, below: int | None, most: int, period: TimeRange = ANY_TIME
) -> list[int]:
    """Ids of at most `most` decisions of one endpoint, or of all if empty, below an id; newest first.

    Ids give the order even if the wall clock was set back: all between the first and the last of a period belong to it.
    """
    query = select(col(DecisionRow.id)).order_by(col(DecisionRow.id).desc()).limit(most)
    if endpoint:
        query = query.where(col(DecisionRow.endpoint) == endpoint)
    if below is not None:
        query = query.where(col(DecisionRow.id) < below)
    if period.since is not None:
        later = select(func.min(col(DecisionRow.id)))
        later = later.where(col(DecisionRow.create_time) >= period.since.timestamp())
        first = connection.execute(later).scalar() or sys.maxsize
        held = select(func.max(col(DecisionRow.id))).where(col(DecisionRow.id) < first)
        held = held.group_by(col(DecisionRow.endpoint))
        query = query.where(or_(col(DecisionRow.id) >= first, col(DecisionRow.id).in_(held)))
    if period.until is not None:
        earlier = select(func.max(col(DecisionRow.id)))
        earlier = earlier.where(col(DecisionRow.create_time) <= period.until.timestamp())
        query = query.where(col(DecisionRow.id) <= (connection.execute(earlier).scalar() or 0))
    return [row["id"] for row in connection.execute(query).mappings()]


def kept_since(connection: Connection, endpoint: str) -> datetime | None:
    """The time from which no decision was forgotten, of one endpoint or of all; None if none was."""
    own, id_ = col(DecisionRow.endpoint), func.min(col(DecisionRow.id))
    full = select(id_).group_by(own).having(func.count() >= KEPT)
    if endpoint:
        full = full.where(own == endpoint)
    over = select(func.max(col(DecisionRow.id)) - KEPT_IN_ALL).scalar_subquery()
    of_all = select(func.min(col(DecisionRow.id))).where(col(DecisionRow.id) > over, over > 0)
    oldest = or_(col(DecisionRow.id).in_(full), col(DecisionRow.id).in_(of_all))
    time = connection.execute(select(func.max(col(DecisionRow.create_time))).where(oldest)).scalar()
    return None if time is None else moment(time)


def forget_oldest(connection: Connection) -> None:
    """Remove decisions beyond `KEPT_IN_ALL`, some thousands at a time."""
    id_ = col(DecisionRow.id)
    over = select(func.max(id_) - KEPT_IN_ALL).scalar_subquery()
    last_ones = select(func.max(id_)).group_by(col(DecisionRow.endpoint))
    old = select(id_).where(id_ <= over, id_.not_in(last_ones)).order_by(id_).limit(10_000)
    connection.execute(delete(DecisionRow).where(id_.in_(old)))


def decisions(connection: Connection, ids: Sequence[int]) -> list[StoredDecision]:
    """Decisions by id, newest first."""
    return _decisions(connection, select(DecisionRow).where(col(DecisionRow.id).in_(ids)))


def latest(connection: Connection, *endpoints: str) -> dict[str, StoredDecision]:
    """The last decision of each of these endpoints that has one."""
    newest = select(func.max(col(DecisionRow.id))).where(col(DecisionRow.endpoint) == EndpointRow.id)
    last_one = newest.correlate(EndpointRow).scalar_subquery()
    own = select(DecisionRow).join(EndpointRow, col(DecisionRow.id) == last_one)
    found = _decisions(connection, own.where(col(EndpointRow.id).in_(endpoints)))
    return {one.endpoint: one for one in found}


def _decisions(connection: Connection, query: Select[Any], most: int | None = None) -> list[StoredDecision]:
    rows = connection.execute(query.order_by(col(DecisionRow.id).desc()).limit(most)).mappings().all()
    own = select(RepetitionRow).where(col(RepetitionRow.endpoint).in_({row["endpoint"] for row in rows}))
    again = {row["decision"]: row for row in connection.execute(own).mappings()}
    counted = [(row, again.get(row["id"], row)) for row in rows]
    return [
        StoredDecision(
            id=row["id"],
            endpoint=row["endpoint"],
            body=row["body"],
            count=times["count"],
            create_time=moment(row["create_time"]),
            last_time=moment(times["last_time"]),
        )
        for row, times in counted
    ]


def remove_decisions(connection: Connection, endpoint: str) -> None:
    """Remove all decisions of an endpoint."""
    connection.execute(delete(DecisionRow).where(col(DecisionRow.endpoint) == endpoint))
    _remove_repetition(connection, endpoint)


def _remove_repetition(connection: Connection, endpoint: str) -> None:
    _FORGET_REPETITION.run(connection, [{"key": endpoint}])


_log = get_logger(__name__)
_ID_DIGITS = 16
MOST_INPUT_BYTES = 65_536
"""Most bytes of a decision's inputs that are stored with it."""
SAVE_EVERY = 300.0
"""Seconds between writes of counts."""
SAVED_AT_ONCE = 1_000
"""Counts written in one work of the store, so that others get their turn."""


@dataclass(frozen=True, slots=True)
class Repetition:
    """The latest repetition of an endpoint's last decision; perhaps only its first time is on disk."""

    times: Times
    decision: Decision
    question: Question | None

    @property
    def body(self) -> bytes:
        """Its stored form."""
        return _body(self.decision, self.question)


@dataclass(frozen=True, slots=True)
class Recorded:
    """How often a decision was taken, and whether this time is on disk."""

    times: Times
    stored: bool


def repeated(known: Last | None, text: str, before: Repetition | None) -> Recorded | None:
    """How often the last decision was taken, by `known` or `before`; None if `text` differs from it."""
    if known is None or known.sameness != text:
        return None
    more = before is not None and before.times.decision == known.times.decision
    return Recorded(before.times if before is not None and more else known.times, stored=False)


def record(
    connection: Connection,
    decision: Decision,
    wall: datetime,
    question: Question | None = None,
    *,
    before: Repetition | None = None,
    quiet: bool = False,
) -> Recorded:
    """Store a decision and its inputs, as a repetition if it says the same as the last one.

    `before`: the last decision, if more is known of it than is on disk. `quiet`: a repetition is not written.
    """
    endpoint, text = decision.endpoint, sameness(decision)
    again = repeated(last(connection, endpoint), text, before)
    if again is None:
        if before is None:
            _settle(connection, endpoint)
        else:
            _settle(connection, endpoint, before.times, before.body)
        time = wall.timestamp()
        said = {"endpoint": endpoint, "sameness": text, "body": _body(decision, question), "count": 1}
        _ADD.run(connection, [{**said, "create_time": time, "last_time": time}])
        [[key]] = _ID.all(connection, {"key": endpoint})
        _FORGET_OLD.run(connection, [{"key": endpoint, "kept": KEPT}])
        return Recorded(Times(key, 1, wall), stored=True)
    if quiet:
        return again
    times = Times(again.times.decision, again.times.count + 1, wall)
    _settle(connection, endpoint, times, _body(decision, question))
    return Recorded(times, stored=True)


def amend(
    connection: Connection, decision_id: int, decision: Decision, question: Question | None = None
) -> None:
    """Complete a decision that was stored before it was acted on."""
    own = update(DecisionRow).where(col(DecisionRow.id) == decision_id)
    connection.execute(own.values(sameness=sameness(decision), body=_body(decision, question)))


def _body(decision: Decision, question: Question | None) -> bytes:
    """The stored form of a decision; too long inputs are omitted."""
    body = decision_body(decision).SerializeToString()
    if question is not None:
        inputs = question_to_wire(question)
        if inputs.ByteSize() <= MOST_INPUT_BYTES:
            body += internal.StoredInputs(inputs=inputs).SerializeToString()
    return body


def id_text(decision_id: int) -> str:
    """The id of a decision in its name; later ones sort after earlier ones."""
    return f"{decision_id:0{_ID_DIGITS}d}"


def inputs_of(stored: StoredDecision) -> internal.DecisionInputs | None:
    """The inputs of a decision, if stored."""
    found = internal.StoredInputs.FromString(stored.body)
    return found.inputs if found.HasField("inputs") else None


def learnt(connection: Connection, endpoint: str, now: float) -> dict[str, Learnt]:
    """What rules of an endpoint last learned, by rule id; the clock may have been another then."""
    own = select(DecisionRow).where(col(DecisionRow.endpoint) == endpoint)
    for stored in _decisions(connection, own, most=_RECALLED):
        inputs = inputs_of(stored)
        if inputs is not None and inputs.learnt:
            known = {rule: from_wire(Learnt, one, rule).carried for rule, one in inputs.learnt.items()}
            return {
                rule: Learnt(tuple(replace(one, at=now) for one in carried), ready=-1, since=now)
                for rule, carried in known.items()
            }
    return {}


def to_wire(stored: StoredDecision) -> api.Decision:
    """The message of a stored decision; before 1.0 its codes were texts, in fields with other numbers."""
    wire = api.Decision.FromString(stored.body)
    if text := _unknown(wire, _LIMITED_BY_TEXT):
        wire.limited_by = api.DecisionCode.Value(f"DECISION_CODE_{text}")
    for step in wire.steps:
        if text := _unknown(step, _CODE_TEXT):
            step.code = api.DecisionCode.Value(f"DECISION_CODE_{text}")
    wire.DiscardUnknownFields()
    wire.name = decision_name(stored.endpoint, id_text(stored.id))
    wire.create_time.FromDatetime(stored.create_time)
    wire.last_time.FromDatetime(stored.last_time)
    wire.count = stored.count
    return wire


def _unknown(message: Message, number: int) -> str:
    """The text in a field that the contract no longer has; empty if there is none."""
    fields = UnknownFieldSet(message)
    found = (fields[at] for at in range(len(fields)))
    return next((one.data.decode() for one in found if one.field_number == number), "")


class Repetitions:
    """How often the last decision of each endpoint was taken, and its latest content.

    Counts and times on disk lag by minutes, and the rest is written once another decision follows: an endpoint without changes
    writes nothing.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, Repetition] = {}
        self._unsaved: set[str] = set()

    def of(self, endpoint: str) -> Repetition | None:
        """The last decision of an endpoint, if it was repeated and not stored since."""
        return self._known.get(endpoint)

    def note(self, recorded: Recorded, decision: Decision, wall: datetime, question: Question | None) -> None:
        """Remember a recorded decision if it was not written."""
        if recorded.stored:
            self.forget(decision.endpoint)
            return
        times = Times(recorded.times.decision, recorded.times.count + 1, wall)
        self._known[decision.endpoint] = Repetition(times, decision, question)
        self._unsaved.add(decision.endpoint)

    def forget(self, endpoint: str) -> None:
        """The endpoint is deleted, or its last decision is completely on disk."""
        self._known.pop(endpoint, None)
        self._unsaved.discard(endpoint)

    def shown(self, stored: StoredDecision) -> StoredDecision:
        """A stored decision with its latest repetition."""
        known = self._known.get(stored.endpoint)
        if known is None or known.times.decision != stored.id:
            return stored
        times = known.times
        return replace(stored, body=known.body, count=times.count, last_time=times.last_time)

    def summary(self, stored: StoredDecision) -> str:
        """The latest content of a stored decision, in one line."""
        known = self._known.get(stored.endpoint)
        if known is None or known.times.decision != stored.id:
            return api.Decision.FromString(stored.body).summary
        return known.decision.summary

    @asynccontextmanager
    async def kept(self) -> AsyncGenerator[None]:
        """Write the counts when the context ends."""
        try:
            yield
        finally:
            await self.save()

    async def run(self) -> None:
        """Write counts and times periodically; never ends."""
        while True:
            await asyncio.sleep(SAVE_EVERY)
            await self.save()

    async def save(self) -> None:
        """Write counts and times that are not on disk; if that fails, later."""
        unsaved = sorted(self._unsaved)
        for start in range(0, len(unsaved), SAVED_AT_ONCE):
            some = unsaved[start : start + SAVED_AT_ONCE]
            every = {endpoint: self._known[endpoint].times for endpoint in some if endpoint in self._known}
            try:
                await self._store.write(partial(save_times, every=every))
            except GpuscaleError as error:
                _log.warning("cannot save counts of decisions", error=error.message)
                return
            current = {one: self._known[one].times for one in every if one in self._known}
            self._unsaved -= {one for one, times in every.items() if current.get(one) == times}
        try:
            await self._store.write(forget_oldest, frees=True)
        except GpuscaleError as error:
            _log.warning("cannot delete old decisions", error=error.message)


class DecisionLog:
    """Reads the stored decisions."""

    def __init__(self, store: Store, repetitions: Repetitions) -> None:
        self._store = store
        self._repetitions = repetitions

    async def get(self, endpoint: str, decision: str) -> StoredDecision:
        """One decision by the ids in its name; NotFoundError if there is none, or it was forgotten."""
        stored = None
        if _is_id(decision):
            stored = await self._store.read(
                partial(find_decision, endpoint=endpoint, decision_id=int(decision))
            )
        return self._repetitions.shown(NotFoundError.unless(stored, decision_name(endpoint, decision)))

    async def list(
        self, endpoint: str, request: ListRequest, period: TimeRange = ANY_TIME
    ) -> tuple[Sequence[api.Decision], str, datetime | None]:
        """A page of decisions of one endpoint or all, newest first by default; with `kept_since` if a period is given.

        A filter, or another order, examines `SEARCHED` decisions, read at once.
        """
        narrow = request.filter.strip() or request.order_by.strip()
        most = SEARCHED if narrow else page_limit(request.page_size) + 1

        def read(connection: Connection) -> tuple[Sequence[api.Decision], str, datetime | None]:
            def older(last: str) -> Iterator[StoredDecision]:
                ids = decision_ids(connection, endpoint, int(last) if _is_id(last) else None, most, period)
                return map(self._repetitions.shown, decisions(connection, ids))

            found, token = listed(
                older, request, api.Decision, key=lambda one: id_text(one.id), encode=to_wire, descending=True
            )
            return found, token, kept_since(connection, endpoint) if period else None

        return await self._store.read(read)


def _is_id(text: str) -> bool:
    return len(text) == _ID_DIGITS and text.isascii() and text.isdecimal()
