"""A term: the time in which a process leads. Whoever writes or answers asks it first.

The server takes the lead away no earlier than `lease` seconds after it last heard from the leader. The leader therefore
trusts its lead for as long from the moment at which it last *asked* a question that was answered; a process that was
stopped for longer knows, before it does anything else, that its term may be over.
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

    address: str  # HOST:PORT of the leader
    epoch: int  # number of the term
    secret: str = field(repr=False)  # what proves that a call comes from a process on the same database


class Term:
    """One term. All but `confirm` and `close` may be called by any thread.

    Args:
        lead: who leads in it; each term has a higher epoch than all before it.
        socket: descriptor of the connection that holds the lead.
        lease: seconds for which an answer of the server is trusted.
        asked: when the question that gave the lead was asked, in seconds of CLOCK_BOOTTIME.
    """

    def __init__(self, lead: Lead, socket: int, lease: float, asked: float) -> None:
        self.lead = lead
        self.over = asyncio.Event()
        """Set once the term is over; wait for it on the event loop."""
        self._socket = os.dup(socket)
        self._lease = lease
        self._trusted_until = asked + lease
        self._ended = False
        self._loop = asyncio.get_running_loop()

    @property
    def epoch(self) -> int:
        """Its number."""
        return self.lead.epoch

    def leads(self) -> bool:
        """Whether this process still leads: nothing says otherwise, and the connection is up."""
        if self._ended or now() >= self._trusted_until:
            return False
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)  # the other side closed the connection, read or not
        return not poll.poll(0)

    def confirm(self, asked: float) -> None:
        """The server answered a question that was asked then."""
        self._trusted_until = asked + self._lease

    def resign(self) -> None:
        """The term is over; nothing under way may rely on it any more."""
        self._ended = True
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.over.set)

    def close(self) -> None:
        """End the term, where it has not ended yet, and close what it watched."""
        self.resign()
        os.close(self._socket)


def now() -> float:
    """Seconds of CLOCK_BOOTTIME, which a host that sleeps does not stop."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
