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

from gpuscale.common.rpc.channel import MAX_STREAMS_PER_CONNECTION
from gpuscale.common.runtime.logs import get_logger

PERIOD: Final = 10.0
"""Least seconds between two lines about failures of one upstream."""

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
    """

    def __init__(self, open_channel: Callable[[], grpc.aio.Channel]) -> None:
        self._open = open_channel
        self._lanes: list[_Lane] = []

    @contextmanager
    def stream(self) -> Generator[grpc.aio.Channel]:
        """The channel for one stream, which lasts as long as the block."""
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
    """A program that calls are forwarded to.

    Attributes:
        name: what to call it in errors.
        channel: where its unary calls go; the caller closes it.
        streams: where its streams go.
        private: whether nobody can listen in, so that tokens may travel.
        outage: tells the log while it does not answer.
    """

    name: str
    channel: grpc.aio.Channel
    streams: Lanes
    private: bool
    outage: Outage = field(default_factory=Outage)
