"""What a standby does with calls: it forwards them to the leader, once, for callers that do not look for the leader themselves."""

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Final

import grpc

from gpuscale.common.errors import GpuscaleError, UnavailableError
from gpuscale.common.rpc.forwarder import Forwarder
from gpuscale.common.rpc.interceptor import Handler
from gpuscale.common.rpc.meter import counted_elsewhere
from gpuscale.common.rpc.upstreams import STREAMS, Lanes, Metadata, Upstream
from gpuscale.common.rpc.wrapped_channel import FOLLOWS, never_sent
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.security.auth import FORWARDED_KEY, current_principal
from gpuscale.common.security.forwarded import MOST_BYTES, seal
from gpuscale.common.store.term import Lead

MOST_STREAMS: Final = 4 * STREAMS
"""Streams that a standby forwards at once; more are refused, and their callers told to come again."""
RETRY_AFTER: Final = 0.2
"""Seconds after which a caller that was turned away should ask again: as often as a standby looks for the lead."""

_KEPT_HERE: Final = frozenset({FORWARDED_KEY, FOLLOWS[0]})
_log = get_logger(__name__)


def not_leader(leader: str) -> UnavailableError:
    """The answer to a call of a process that does not lead: nothing was done. `leader`: its address, if it is known."""
    where = f"; {leader} does" if leader else "; the leader is not known"
    return UnavailableError(
        f"this process does not lead{where}",
        reason="NOT_LEADER",
        metadata={"leader": leader} if leader else {},
        retry_after=RETRY_AFTER,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leader(Upstream):
    """The leader of a term, seen from a standby."""

    lead: Lead

    def caller(self, path: str) -> Metadata:
        sealed = seal(self.lead.epoch, self.lead.secret, path, current_principal())
        if len(sealed) > MOST_BYTES:
            raise not_leader(self.lead.address)
        counted_elsewhere.set(True)  # the leader counts and notes the call
        return ((FORWARDED_KEY, sealed),)

    def failure(self, error: grpc.aio.AioRpcError | None) -> UnavailableError:
        counted_elsewhere.set(False)
        if error is not None and never_sent(error):
            return not_leader(self.lead.address)
        return UnavailableError(
            "the leader was lost; the call may have been executed",
            reason="LEAD_LOST",
            retry_after=RETRY_AFTER,
        )


class Relay:
    """Forwards calls to whoever leads; an async context manager, which closes its connections.

    Args:
        services: full names.
        open_channel: to an address, with what this process shows to others.
    """

    def __init__(self, services: Sequence[str], open_channel: Callable[[str], grpc.aio.Channel]) -> None:
        self._services = services
        self._open = open_channel
        self._lead: Lead | None = None
        self._known = False
        self._forwarder = Forwarder({})
        self._connections = AsyncExitStack()

    def handler(self, details: grpc.HandlerCallDetails) -> "Handler | None":
        """What forwards a call; None for one that was forwarded already, or whose caller follows the leader."""
        if not self._known or any(key in _KEPT_HERE for key, _ in details.invocation_metadata or ()):
            return None
        return self._forwarder.service(details)

    async def follow(self, lead: Lead | None) -> None:
        """From now on calls go there. While the lead is not known, calls under way stay where they are.

        Calls under way to a leader before that end as LEAD_LOST.
        """
        self._known = lead is not None
        if lead is None or lead == self._lead:
            return
        await self.end()
        self._lead = lead
        try:
            channel = await self._connections.enter_async_context(self._open(lead.address))
        except GpuscaleError as error:
            _log.warning("cannot call the leader", leader=lead.address, problem=error.message)
            return
        streams = await self._connections.enter_async_context(
            Lanes(partial(self._open, lead.address), MOST_STREAMS)
        )
        leader = _Leader("leader", channel, streams, private=False, lead=lead)
        self._forwarder = Forwarder(dict.fromkeys(self._services, leader))

    async def end(self) -> None:
        """Forward nothing from now on; calls under way end as LEAD_LOST."""
        self._lead, self._forwarder = None, Forwarder({})
        await self._connections.aclose()
