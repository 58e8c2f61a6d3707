"""The messages of one agent's stream, until the agent, or another stream of its node, ends it."""

import asyncio
from collections.abc import AsyncIterator

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.errors import AbortedError, DeadlineExceededError


class Requests:
    """Reads a request stream; `end` interrupts it from outside."""

    def __init__(self, requests: AsyncIterator[monitor_api.StreamTelemetryRequest]) -> None:
        self._requests = requests
        self._waiting: asyncio.Timeout | None = None
        self._ended = False

    def end(self) -> None:
        """Make `next` raise AbortedError, now or when it is called next."""
        self._ended = True
        if self._waiting is not None:
            self._waiting.reschedule(0)

    async def next(self, limit: float | None = None) -> monitor_api.StreamTelemetryRequest | None:
        """The next message; None when the agent has ended the stream.

        Raises:
            AbortedError: another stream of the node took over.
            DeadlineExceededError: nothing came within `limit` seconds.
        """
        if self._ended:
            raise _superseded()
        try:
            async with asyncio.timeout(limit) as self._waiting:
                return await anext(self._requests)
        except StopAsyncIteration:
            return None
        except TimeoutError:
            if self._ended:
                raise _superseded() from None
            raise DeadlineExceededError(f"no message within {limit:g} s", reason="NO_HELLO") from None
        finally:
            self._waiting = None


def _superseded() -> AbortedError:
    return AbortedError("another stream reports for this node now", reason="STREAM_SUPERSEDED")
