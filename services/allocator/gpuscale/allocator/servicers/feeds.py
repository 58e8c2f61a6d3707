"""Streams. Cordons and quotas do not report changes that grants cause, so they are polled while somebody reads."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Final, Generic, NoReturn, TypeVar

from google.protobuf.message import Message

from gpuscale.allocator.domain.model import Reservation
from gpuscale.allocator.state.archive import RecordFilter
from gpuscale.api.allocator import v1 as api
from gpuscale.common.filters import compile_filter
from gpuscale.common.rpc.feed import FeedView, ResourceFeed

PERIOD: Final = 1.0
"""Seconds between two looks."""

V = TypeVar("V")


class LookedAtFeed(Generic[V]):
    """The feed of one kind of resource, whose Watch method streams `response`. `run` must run.

    `every` returns the current values by name, and `show` makes the message `of` one; equal values count as unchanged.
    """

    def __init__(
        self,
        response: Callable[..., Message],
        of: type[Message],
        every: Callable[[], Mapping[str, V]],
        show: Callable[[V], Message],
    ) -> None:
        self._feed: ResourceFeed[V] = ResourceFeed(response, lambda one, _: show(one))
        self._of = of
        self._every = every
        self._begun = asyncio.Event()

    async def stream(self, request: Any) -> AsyncGenerator[bytes]:
        """Encoded responses, without end; InvalidArgumentError for an invalid filter or resume_token."""
        matches = compile_filter(request.filter, self._of) if request.filter.strip() else None
        self._look()
        self._begun.set()
        async for message in self._feed.stream(request, FeedView(matches=matches)):
            yield message

    async def run(self) -> NoReturn:
        """Keep the feed current while it is read."""
        while True:
            await self._begun.wait()
            self._begun.clear()
            while self._feed.watched:
                await asyncio.sleep(PERIOD)
                self._look()

    def _look(self) -> None:
        now = self._every()
        for name in [name for name in self._feed.names if name not in now]:
            self._feed.remove(name)
        for name, one in now.items():
            if self._feed.get(name) != one:
                self._feed.put(name, one)


def watched(request: api.WatchReservationsRequest) -> Callable[[Reservation], bool]:
    """Which reservations a watcher wants; when a planned revocation is taken back, it is sent once more."""
    wanted, told = RecordFilter(request.holder, request.gpu_uuid), set[str]()

    def is_wanted(one: Reservation) -> bool:
        if one not in wanted or not request.revoked:
            return one in wanted
        if one.revoke_at is not None:
            told.add(one.id)
            return True
        was_told = one.id in told
        told.discard(one.id)
        return was_told

    return is_wanted
