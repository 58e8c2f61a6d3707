"""Repeating a call that had no answer. Only for calls that may be repeated: those with a request_id, and reads."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from math import inf
from typing import TypeVar

from gpuscale.common.errors import DeadlineExceededError, GpuscaleError, UnavailableError
from gpuscale.common.runtime.tasks import Backoff

ATTEMPTS = 4
"""Times that a call is made at most. With the waits between, a service that is started anew is back by then."""
_FIRST_WAIT = 0.25
_UNANSWERED = (UnavailableError, DeadlineExceededError)

Answer = TypeVar("Answer")


def retrying(call: Callable[[], Answer], until: float = inf) -> Answer:
    """The answer of a call, which is made again while there is none, but not after `until` (of `time.monotonic`).

    Raises:
        GpuscaleError: the last attempt failed, or an earlier one with an answer.
    """
    waits = Backoff(initial=_FIRST_WAIT, cap=2.0)
    for _ in range(ATTEMPTS - 1):
        try:
            return call()
        except _UNANSWERED as error:
            wait = _wait(error, waits)
            if time.monotonic() + wait >= until:
                raise
            time.sleep(wait)
    return call()


async def retrying_async(call: Callable[[], Awaitable[Answer]], until: float = inf) -> Answer:
    """`retrying`, for the running event loop.

    Raises:
        GpuscaleError: the last attempt failed, or an earlier one with an answer.
    """
    waits = Backoff(initial=_FIRST_WAIT, cap=2.0)
    for _ in range(ATTEMPTS - 1):
        try:
            return await call()
        except _UNANSWERED as error:
            wait = _wait(error, waits)
            if time.monotonic() + wait >= until:
                raise
            await asyncio.sleep(wait)
    return await call()


def _wait(error: GpuscaleError, waits: Backoff) -> float:
    """Seconds until the next attempt: what the server says, or a little longer each time."""
    return waits.next() if error.retry_after is None else min(2.0, error.retry_after)
