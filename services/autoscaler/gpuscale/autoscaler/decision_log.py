"""Decisions between the model, the store and the wire."""

from datetime import datetime
from functools import partial

from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.autoscaler import decision_store
from gpuscale.autoscaler.decision_store import StoredDecision
from gpuscale.autoscaler.domain.decisions import sameness
from gpuscale.autoscaler.model import Decision
from gpuscale.autoscaler.state.store import Connection
from gpuscale.autoscaler.wire.translate_inputs import question_to_wire
from gpuscale.autoscaler.wire.translate_state import decision_body
from gpuscale.autoscaler.domain.whatif import Question
from gpuscale.common.errors import NotFoundError
from gpuscale.common.names import decision_name
from gpuscale.common.runtime.paging import MAX_PAGE_SIZE, last_key, page
from gpuscale.common.store.store import Store

_ID_DIGITS = 16
MOST_INPUT_BYTES = 65_536
"""What a decision was evaluated from is stored with it if it is no longer than this."""


def record(
    connection: Connection, decision: Decision, wall: datetime, question: Question | None = None
) -> int:
    """Store a decision with what it was evaluated from, as a repetition where it says what the last one said.

    Returns:
        Its id.
    """
    body = _body(decision, question)
    return decision_store.record(connection, decision.endpoint, sameness(decision), body, wall)


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


class DecisionLog:
    """The stored decisions, to read."""

    def __init__(self, store: Store) -> None:
        self._store = store

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
        return stored

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

        return await self._store.read(read)


def _is_id(text: str) -> bool:
    return len(text) == _ID_DIGITS and text.isascii() and text.isdecimal()
