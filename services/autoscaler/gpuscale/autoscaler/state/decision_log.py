"""Decisions between the model, the store and the wire."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial

from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.autoscaler.domain.decisions import sameness
from gpuscale.autoscaler.domain.model import Decision
from gpuscale.autoscaler.domain.whatif import Question
from gpuscale.autoscaler.state import decision_store
from gpuscale.autoscaler.state.decision_store import StoredDecision, Times
from gpuscale.autoscaler.state.store import Connection
from gpuscale.autoscaler.wire.translate_inputs import question_to_wire
from gpuscale.autoscaler.wire.translate_state import decision_body
from gpuscale.common.errors import GpuscaleError, NotFoundError
from gpuscale.common.names import decision_name
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.store.store import Store
from gpuscale.common.wire import MAX_PAGE_SIZE, last_key, page

_ID_DIGITS = 16
MOST_INPUT_BYTES = 65_536
"""What a decision was evaluated from is stored with it if it is no longer than this."""
SAVE_EVERY = 60.0
"""Seconds from one saving of counts to the next."""
SAVED_AT_ONCE = 100
"""Counts that are saved in one work of the store, so that others get their turn."""
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Repetition:
    """The last decision of an endpoint as it was taken last; no more of it than its first time may be on disk."""

    times: Times
    decision: Decision
    question: Question | None

    @property
    def body(self) -> bytes:
        """As it is stored."""
        return _body(self.decision, self.question)


@dataclass(frozen=True, slots=True)
class Recorded:
    """How often a decision had been taken, and whether this time is on disk."""

    times: Times
    stored: bool


def record(
    connection: Connection,
    decision: Decision,
    wall: datetime,
    question: Question | None = None,
    *,
    before: Repetition | None = None,
    quiet: bool = False,
) -> Recorded:
    """Store a decision with what it was evaluated from, as a repetition where it says what the last one said.

    Args:
        connection: of the store.
        decision: what was decided.
        wall: when.
        question: what it was evaluated from.
        before: the last decision of the endpoint, where more is known of it than is on disk.
        quiet: whether a repetition is left to be remembered, and nothing is written.
    """
    endpoint, text = decision.endpoint, sameness(decision)
    last = decision_store.last(connection, endpoint)
    if last is None or last[0] != text:
        if before is None:
            decision_store.settle(connection, endpoint)
        else:
            decision_store.settle(connection, endpoint, before.times, before.body)
        added = decision_store.add(connection, endpoint, text, _body(decision, question), wall)
        return Recorded(Times(added, 1, wall), stored=True)
    times = last[1] if before is None or before.times.decision != last[1].decision else before.times
    if quiet:
        return Recorded(times, stored=False)
    times = Times(times.decision, times.count + 1, wall)
    decision_store.settle(connection, endpoint, times, _body(decision, question))
    return Recorded(times, stored=True)


def amend(
    connection: Connection, decision_id: int, decision: Decision, question: Question | None = None
) -> None:
    """Complete a decision that was stored before it was acted on."""
    decision_store.amend(connection, decision_id, sameness(decision), _body(decision, question))


def _body(decision: Decision, question: Question | None) -> bytes:
    """A decision as it is stored; inputs that are too long are left out."""
    body = decision_body(decision)
    if question is not None:
        inputs = question_to_wire(question)
        if inputs.ByteSize() <= MOST_INPUT_BYTES:
            body.inputs.CopyFrom(inputs)
    return body.SerializeToString()


def shown(decision: Decision, decision_id: int, wall: datetime) -> autoscaler_api.Decision:
    """The message of a decision that was just taken."""
    wire = decision_body(decision)
    wire.name = decision_name(decision.endpoint, id_text(decision_id))
    wire.create_time.FromDatetime(wall)
    wire.last_time.FromDatetime(wall)
    wire.count = 1
    return wire


def id_text(decision_id: int) -> str:
    """The id of a decision in its name; later ones sort after earlier ones."""
    return f"{decision_id:0{_ID_DIGITS}d}"


def to_wire(stored: StoredDecision, *, inputs: bool = False) -> autoscaler_api.Decision:
    """The message of a stored decision; `inputs`: with all that it was evaluated from."""
    wire = autoscaler_api.Decision.FromString(stored.body)
    if not inputs:
        wire.ClearField("inputs")
    wire.name = decision_name(stored.endpoint, id_text(stored.id))
    wire.create_time.FromDatetime(stored.create_time)
    wire.last_time.FromDatetime(stored.last_time)
    wire.count = stored.count
    return wire


class Repetitions:
    """How often the last decision of each endpoint was taken, and what it said last.

    On disk are the counts and times of a minute ago, and the rest once another decision follows: an endpoint for which
    nothing changes writes nothing.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, Repetition] = {}
        self._unsaved: set[str] = set()

    def of(self, endpoint: str) -> Repetition | None:
        """The last decision of an endpoint, if it was repeated and not stored since."""
        return self._known.get(endpoint)

    def note(self, recorded: Recorded, decision: Decision, wall: datetime, question: Question | None) -> None:
        """A decision was recorded: remember it if it was left to be."""
        if recorded.stored:
            self.forget(decision.endpoint)
            return
        times = Times(recorded.times.decision, recorded.times.count + 1, wall)
        self._known[decision.endpoint] = Repetition(times, decision, question)
        self._unsaved.add(decision.endpoint)

    def forget(self, endpoint: str) -> None:
        """The endpoint is gone, or its last decision is on disk as a whole."""
        self._known.pop(endpoint, None)
        self._unsaved.discard(endpoint)

    def shown(self, stored: StoredDecision) -> StoredDecision:
        """A stored decision as it was taken last."""
        known = self._known.get(stored.endpoint)
        if known is None or known.times.decision != stored.id:
            return stored
        times = known.times
        return replace(stored, body=known.body, count=times.count, last_time=times.last_time)

    @asynccontextmanager
    async def kept(self) -> AsyncGenerator[None]:
        """Save them when the context is left."""
        try:
            yield
        finally:
            await self.save()

    async def run(self) -> None:
        """Save counts and times every minute; never ends."""
        while True:
            await asyncio.sleep(SAVE_EVERY)
            await self.save()

    async def save(self) -> None:
        """Save the counts and times that are not on disk; where that fails, later."""
        unsaved = sorted(self._unsaved)
        for start in range(0, len(unsaved), SAVED_AT_ONCE):
            some = unsaved[start : start + SAVED_AT_ONCE]
            every = {endpoint: self._known[endpoint].times for endpoint in some if endpoint in self._known}
            try:
                await self._store.write(partial(decision_store.save_times, every=every))
            except GpuscaleError as error:
                _log.warning("how often decisions were taken was not saved", error=error.message)
                return
            self._unsaved -= {one for one, times in every.items() if times == self._times(one)}

    def _times(self, endpoint: str) -> Times | None:
        known = self._known.get(endpoint)
        return None if known is None else known.times


class DecisionLog:
    """The stored decisions, to read."""

    def __init__(self, store: Store, repetitions: Repetitions) -> None:
        self._store = store
        self._repetitions = repetitions

    async def get(self, endpoint: str, decision: str) -> StoredDecision:
        """One decision by the ids in its name.

        Raises:
            NotFoundError: there is none, or it is kept no more.
        """
        stored = None
        if _is_id(decision):
            stored = await self._store.read(
                partial(decision_store.decision, endpoint=endpoint, decision_id=int(decision))
            )
        if stored is None:
            name = decision_name(endpoint, decision)
            raise NotFoundError(f"there is no {name}", metadata={"name": name})
        return self._repetitions.shown(stored)

    async def list(self, endpoint: str, page_size: int, page_token: str) -> tuple[list[StoredDecision], str]:
        """A page of the decisions of one endpoint, or of all, newest first.

        Raises:
            InvalidArgumentError: the token is not one of this list.
        """
        last = last_key(page_token, descending=True)

        def read(connection: Connection) -> tuple[list[StoredDecision], str]:
            below = int(last) if _is_id(last) else None
            ids = decision_store.decision_ids(connection, endpoint, below, MAX_PAGE_SIZE + 1)
            some, token = page(ids, key=id_text, page_size=page_size, page_token=page_token, descending=True)
            return decision_store.decisions(connection, some), token

        found, token = await self._store.read(read)
        return [self._repetitions.shown(one) for one in found], token


def _is_id(text: str) -> bool:
    return len(text) == _ID_DIGITS and text.isascii() and text.isdecimal()
