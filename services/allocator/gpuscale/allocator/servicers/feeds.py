"""What is streamed of cordons and quotas. They say nothing when a grant changes them, so they are looked at while somebody reads."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Final, Generic, NoReturn, TypeVar

from google.protobuf.message import Message

from gpuscale.common.filters import compile_filter
from gpuscale.common.rpc.feed import FeedView, ResourceFeed

PERIOD: Final = 1.0
"""Seconds between two looks."""

V = TypeVar("V")


class LookedAtFeed(Generic[V]):
    """The feed of one kind of resource. `run` must run.

    Args:
        response: what its Watch method streams.
        of: the message of a resource.
        every: what there is now, by name; what equals what was there before has not changed.
        show: makes the message.
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
        """Encoded responses, for ever.

        Raises:
            InvalidArgumentError: the filter or the resume_token of the request is none.
        """
        matches = compile_filter(request.filter, self._of) if request.filter.strip() else None
        self._look()
        self._begun.set()
        async for message in self._feed.stream(request, FeedView(matches=matches)):
            yield message

    async def run(self) -> NoReturn:
        """Keep it up to date while it is read, for ever."""
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
