"""Decisions between the model, the store and the wire."""

from datetime import datetime
from functools import partial

from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.autoscaler import decision_store
from gpuscale.autoscaler.decision_store import StoredDecision
from gpuscale.autoscaler.decisions import sameness
from gpuscale.autoscaler.model import Decision
from gpuscale.autoscaler.store import Connection
from gpuscale.autoscaler.translate_state import decision_body
from gpuscale.common.errors import NotFoundError
from gpuscale.common.names import decision_name
from gpuscale.common.paging import page
from gpuscale.common.store import Store

_ID_DIGITS = 16


def record(connection: Connection, decision: Decision, wall: datetime) -> int:
    """Store a decision, as a repetition where it says what the last one said; returns its id."""
    body = decision_body(decision).SerializeToString()
    return decision_store.record(connection, decision.endpoint, sameness(decision), body, wall)


def amend(connection: Connection, decision_id: int, decision: Decision) -> None:
    """Complete a decision that was stored before it was acted on."""
    body = decision_body(decision).SerializeToString()
    decision_store.amend(connection, decision_id, sameness(decision), body)


def id_text(decision_id: int) -> str:
    """The id of a decision in its name; later ones sort after earlier ones."""
    return f"{decision_id:0{_ID_DIGITS}d}"


def to_wire(stored: StoredDecision) -> autoscaler_api.Decision:
    """The message of a stored decision."""
    wire = autoscaler_api.Decision.FromString(stored.body)
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
        if len(decision) == _ID_DIGITS and decision.isascii() and decision.isdecimal():
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

        def read(connection: Connection) -> tuple[list[StoredDecision], str]:
            ids = decision_store.decision_ids(connection, endpoint)
            some, token = page(ids, key=id_text, page_size=page_size, page_token=page_token, descending=True)
            return decision_store.decisions(connection, some), token

        return await self._store.read(read)
