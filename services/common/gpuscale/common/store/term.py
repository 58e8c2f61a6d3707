"""A term: the time in which a process leads. Check it before every write and answer.

The server takes the lead away no earlier than `lease` seconds after it last heard from the leader. So the leader trusts
its lead for `lease` seconds after it *sent* the last query that was answered. A process that was stopped for longer
notices before it does anything else.
"""

import asyncio
import os
import select
import time
from contextlib import suppress
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Lead:
    """Who leads in one term."""

    address: str  # HOST:PORT
    epoch: int  # number of the term
    secret: str = field(repr=False)  # authenticates calls from processes on the same database


class Term:
    """One term. Thread-safe except `confirm` and `close`.

    The epoch of `lead` is higher than those of all earlier terms. `socket` is of the connection that holds the lead; an answer
    of the server is trusted for `lease` seconds, the first from `asked` on, in seconds of CLOCK_BOOTTIME.
    """

    def __init__(self, lead: Lead, socket: int, lease: float, asked: float) -> None:
        self.lead = lead
        self.over = asyncio.Event()
        """Set when the term is over; for the event loop."""
        self._socket = os.dup(socket)
        self._lease = lease
        self._trusted_until = asked + lease
        self._ended = False
        self._loop = asyncio.get_running_loop()

    @property
    def epoch(self) -> int:
        """The number of the term."""
        return self.lead.epoch

    def leads(self) -> bool:
        """Whether this process still leads and the connection is up."""
        if self._ended or now() >= self._trusted_until:
            return False
        poll = select.poll()
        # The peer closed the connection, even if unread data is left.
        poll.register(self._socket, select.POLLRDHUP)
        return not poll.poll(0)

    def confirm(self, asked: float) -> None:
        """The server answered a query that was sent at `asked`."""
        self._trusted_until = asked + self._lease

    def resign(self) -> None:
        """End the term; `leads` is False from now on."""
        self._ended = True
        with suppress(RuntimeError):  # closed loop
            self._loop.call_soon_threadsafe(self.over.set)

    def close(self) -> None:
        """End the term and close its descriptor."""
        self.resign()
        os.close(self._socket)


def now() -> float:
    """Seconds of CLOCK_BOOTTIME, which also counts during a suspend."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
