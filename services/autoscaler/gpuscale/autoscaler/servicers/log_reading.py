"""Parts of what replicas wrote: found by name here, read by their adapters."""

from functools import partial
from typing import Final

from gpuscale.autoscaler.loop.asked_logs import LogPart
from gpuscale.autoscaler.loop.hub import AdapterHub
from gpuscale.autoscaler.state import replica_store
from gpuscale.common.errors import FailedPreconditionError, NotFoundError
from gpuscale.common.names import replica_name
from gpuscale.common.store.store import Store

DEFAULT_BYTES: Final = 65_536
"""Bytes of a part where nobody says how many."""


class LogReading:
    """Reads from the logs of replicas.

    Args:
        store: where replicas are known.
        hub: leads to their adapters.
    """

    def __init__(self, store: Store, hub: AdapterHub) -> None:
        self._store = store
        self._hub = hub

    async def read(
        self, endpoint_id: str, replica_id: str, offset: int | None, most: int
    ) -> tuple[LogPart, bool]:
        """A part of at most `most` bytes (0: `DEFAULT_BYTES`), from `offset` on or the last ones, and whether it has ended.

        Raises:
            FailedPreconditionError: it never ran, or nothing is kept of what it wrote.
            NotFoundError: there is no such replica.
            ResourceExhaustedError: too many read from its adapter.
            UnavailableError: its adapter is not connected, or does not answer.
        """
        name = replica_name(endpoint_id, replica_id)
        one = await self._store.read(partial(replica_store.replica, replica_id=replica_id))
        if one is None or one.endpoint != endpoint_id:
            raise NotFoundError(f"there is no {name}", metadata={"name": name})
        if not one.adapter:
            raise FailedPreconditionError(f"{name} has not run yet", reason="NO_LOG")
        bound = most or DEFAULT_BYTES
        part = await self._hub.read_log(one, offset, bound)
        if part.problem:
            text = f"the log of {name} cannot be read: {part.problem}"
            raise FailedPreconditionError(text, reason="NO_LOG")
        return LogPart(part.content[:bound], part.offset), one.ended
