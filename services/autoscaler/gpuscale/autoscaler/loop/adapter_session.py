"""One connection of a worker adapter: what it reported, and what it is told until it acknowledges it."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress

from gpuscale.autoscaler.domain.desired import DesiredReplica, stopped
from gpuscale.autoscaler.domain.planning import AdapterFacts
from gpuscale.autoscaler.domain.replicas import ReplicaReport
from gpuscale.autoscaler.loop.asked_logs import AskedLogs, LogPart, LogQuestion
from gpuscale.common.errors import GpuscaleError, UnavailableError

RESEND = 2.0
"""Seconds after which a state that was not acknowledged is sent again."""


class AdapterSession:
    """Made by the hub for each connection; `facts.live` says nothing here.

    Args:
        facts: what the adapter said of itself.
        next_revision: a number greater than all before it, in this process and earlier ones.
    """

    def __init__(self, facts: AdapterFacts, next_revision: Callable[[], int]) -> None:
        self.facts = facts
        self.reported: Mapping[str, ReplicaReport] | None = None
        self.unknown_since: dict[str, float] = {}
        self._next_revision = next_revision
        self._revision = 0
        self._acknowledged = 0
        self._lines: Sequence[DesiredReplica] | None = None
        self._stop_told: dict[str, int] = {}
        self.logs = AskedLogs()
        self._changed = asyncio.Event()
        self._closed = False
        self._error: GpuscaleError | None = None

    def heard(self, revision: int, reported: Mapping[str, ReplicaReport]) -> frozenset[str]:
        """Take a report, and tell which replicas this adapter does not have although it knows they should stop."""
        self.reported = reported
        self._acknowledged = revision
        told = (name for name, since in self._stop_told.items() if revision >= since and name not in reported)
        return frozenset(told)

    def tell(self, lines: Sequence[DesiredReplica]) -> None:
        """Send this state if it is not what was sent last."""
        if lines == self._lines:
            return
        self._lines = lines
        self._revision = self._next_revision()
        self._stop_told = {name: self._stop_told.get(name, self._revision) for name in stopped(lines)}
        self._changed.set()

    async def read_log(self, replica: str, offset: int | None, most: int) -> LogPart:
        """Ask the adapter for a part of what a replica wrote.

        Raises:
            ResourceExhaustedError: too many ask.
            UnavailableError: it did not answer, or its connection ended.
        """
        if self._closed:
            raise _disconnected()
        question = self.logs.put(replica, offset, most)
        self._changed.set()
        return await self.logs.answer(question)

    def close(self, error: GpuscaleError | None = None) -> None:
        """End `updates`, with an error if there is one. Only the first call counts."""
        if not self._closed:
            self._closed, self._error = True, error
            self.logs.fail(_disconnected())
            self._changed.set()

    async def updates(self) -> AsyncGenerator[tuple[int, Sequence[DesiredReplica]] | LogQuestion]:
        """The desired state with its revision, whenever it changes and again until it is acknowledged; and questions for logs.

        Raises:
            GpuscaleError: that the connection was closed with.
        """
        while not self._closed:
            self._changed.clear()
            for question in self.logs.unsent():
                yield question
            if self._lines is not None and self._acknowledged < self._revision:
                yield self._revision, self._lines
                if self._changed.is_set():
                    continue
            with suppress(TimeoutError):
                async with asyncio.timeout(RESEND):
                    await self._changed.wait()
        if self._error is not None:
            raise self._error


def _disconnected() -> UnavailableError:
    return UnavailableError("the connection of the adapter ended", reason="ADAPTER_DISCONNECTED")
