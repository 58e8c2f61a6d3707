"""The messages of one agent's stream, until the agent, or another stream of its node, ends it."""

import asyncio
from collections.abc import Awaitable, Callable

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.errors import AbortedError, DeadlineExceededError


class Requests:
    """Reads a request stream, in the task that made this; `end` interrupts it from outside.

    Thousands of streams bring a message each second: there is no timer for each, and no iterator around `read`.

    Args:
        read: what gives a message at a time, such as `read` of a call's context; anything else means the end.
    """

    def __init__(self, read: Callable[[], Awaitable[object]]) -> None:
        self._read = read
        self._task = asyncio.current_task()
        self._waiting = False
        self._ended = False

    def end(self) -> None:
        """Make `next` raise AbortedError, now or when it is called next."""
        if self._waiting and not self._ended and self._task is not None:
            self._task.cancel()
        self._ended = True

    async def first(self, limit: float) -> monitor_api.StreamTelemetryRequest | None:
        """The first message; None when the agent has ended the stream.

        Raises:
            AbortedError: another stream of the node took over.
            DeadlineExceededError: nothing came within `limit` seconds.
        """
        try:
            async with asyncio.timeout(limit):
                return await self.next()
        except TimeoutError:
            raise DeadlineExceededError(f"no message within {limit:g} s", reason="NO_HELLO") from None

    async def next(self) -> monitor_api.StreamTelemetryRequest | None:
        """The next message; None when the agent has ended the stream.

        Raises:
            AbortedError: another stream of the node took over.
        """
        if self._ended:
            raise _superseded()
        self._waiting = True
        try:
            message = await self._read()
        except asyncio.CancelledError:
            if self._ended and self._task is not None and self._task.uncancel() == 0:
                raise _superseded() from None
            raise
        finally:
            self._waiting = False
        return message if isinstance(message, monitor_api.StreamTelemetryRequest) else None


def _superseded() -> AbortedError:
    return AbortedError("another stream reports for this node now", reason="STREAM_SUPERSEDED")
