"""The programs that calls are forwarded to, and the connections to them.

A server lets a connection have so many streams; a call beyond them waits, without a word, until one ends. So unary calls,
of which no more are under way than the gateway itself admits, have a connection of their own, and streams as many as they need.
"""

import asyncio
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Self

import grpc

from gpuscale.common.errors import ResourceExhaustedError, UnavailableError
from gpuscale.common.rpc.channel import MAX_STREAMS_PER_CONNECTION
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.security.auth import find_principal, forwarded_as

RETRY_AFTER: Final = 1.0
"""Seconds after which a caller should try an upstream again that cannot be reached, or has too many streams."""
PERIOD: Final = 10.0
"""Least seconds between two lines about failures of one upstream."""

Metadata = tuple[tuple[str, str | bytes], ...]
_log = get_logger(__name__)


class Outage:
    """Logs failures of one upstream, at most one in each PERIOD, and once that it answers again.

    An upstream that fails only now and then gets no more lines than one that is away.

    Args:
        now: seconds that only grow.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._next = float("-inf")
        self._not_shown = 0
        self._away = ""

    def failed(self, upstream: str, method: str, problem: str) -> None:
        """A call of it failed; the line has the number of those since the last one that got none."""
        now = self._now()
        if now < self._next:
            self._not_shown += 1
            return
        not_shown, self._not_shown = self._not_shown, 0
        self._next, self._away = now + PERIOD, upstream
        _log.warning(
            "upstream failed", upstream=upstream, method=method, problem=problem, not_shown=not_shown
        )

    def answered(self) -> None:
        """It answered a call."""
        if self._away:
            _log.info("upstream answers again", upstream=self._away, not_shown=self._not_shown)
            self._away, self._not_shown = "", 0


STREAMS: Final = MAX_STREAMS_PER_CONNECTION * 9 // 10
"""Streams of one connection; fewer than the server admits, which learns later than we do that one has ended."""


@dataclass(slots=True)
class _Lane:
    """A channel, and how many streams it has."""

    channel: grpc.aio.Channel
    streams: int = 0


class Lanes:
    """Channels for the streams of one upstream; closed at the end of the block.

    Args:
        open_channel: makes one; called for the first stream, and whenever all there are have as many as they may.
        most: streams of all of them; None for any number.
    """

    def __init__(self, open_channel: Callable[[], grpc.aio.Channel], most: int | None = None) -> None:
        self._open = open_channel
        self._most = most
        self._lanes: list[_Lane] = []

    @contextmanager
    def stream(self) -> Generator[grpc.aio.Channel]:
        """The channel for one stream, which lasts as long as the block.

        Raises:
            ResourceExhaustedError: there are too many (reason OVERLOADED).
        """
        if self._most is not None and sum(one.streams for one in self._lanes) >= self._most:
            raise ResourceExhaustedError(
                f"{self._most} streams are already forwarded", reason="OVERLOADED", retry_after=RETRY_AFTER
            )
        lane = next((one for one in self._lanes if one.streams < STREAMS), None)
        if lane is None:
            lane = _Lane(self._open())
            self._lanes.append(lane)
        lane.streams += 1
        try:
            yield lane.channel
        finally:
            lane.streams -= 1

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(lane.channel.close() for lane in self._lanes))


@dataclass(frozen=True, slots=True)
class Upstream:
    """A program that calls are forwarded to."""

    name: str  # what to call it in errors
    channel: grpc.aio.Channel  # where its unary calls go; the caller closes it
    streams: Lanes  # where its streams go
    private: bool  # whether nobody can listen in, so that tokens may travel
    outage: Outage = field(default_factory=Outage, kw_only=True)  # tells the log while it does not answer

    def caller(self, path: str) -> Metadata:  # noqa: ARG002
        """The metadata that name the caller of the current RPC, which calls the method at `path`."""
        return forwarded_as(find_principal())

    def failure(self, error: grpc.aio.AioRpcError | None) -> UnavailableError:  # noqa: ARG002
        """What a caller is told where the connection failed; None: it was closed here."""
        return UnavailableError(
            f"the {self.name} does not answer",
            reason="UPSTREAM_UNAVAILABLE",
            metadata={"service": self.name},
            retry_after=RETRY_AFTER,
        )
