"""Wait for a condition with a deadline, instead of sleeping and hoping.

A check returns a truthy value once it is satisfied. Exceptions of the kinds in `retry_on` mean "not yet"; any other
exception ends the wait at once, since it is a fault of the test and not a matter of time.
"""

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any, NoReturn

import pytest


def calls_of(monkeypatch: pytest.MonkeyPatch, kind: type, method: str) -> list[object]:
    """One item for each call of a method from now on, so that a test can wait for another."""
    calls, original = list[object](), getattr(kind, method)

    def noted(self: object, *given: object) -> object:
        calls.append(self)
        return original(self, *given)

    monkeypatch.setattr(kind, method, noted)
    return calls


Kinds = tuple[type[Exception], ...]
NOT_YET: Kinds = (AssertionError, OSError)


async def eventually(
    check: Callable[[], Any],
    find: Callable[[Any], Any] | None = None,
    timeout: float = 60.0,
    interval: float = 0.02,
    retry_on: Kinds = NOT_YET,
) -> Any:
    """Call `check` (plain or async) until its value, or what `find` finds in that, is truthy, and return it.

    `timeout` and `interval` are seconds of the running loop's clock, so the helper also works on virtual time.
    An async check that is still running at the deadline is cancelled.

    Raises AssertionError: the deadline passed; the text holds the last value or exception.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    last = "the check never finished"
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                found = check()
                value = await found if inspect.isawaitable(found) else found
                found = value if find is None else find(value)
            if found:
                return found
            last = f"last value {value!r}"
        except retry_on as error:
            # The deadline's own TimeoutError says less than what the checks before it saw.
            if loop.time() < deadline or not isinstance(error, TimeoutError):
                last = f"last exception {error!r}"
        if loop.time() + interval > deadline:
            _give_up(timeout, last)
        await asyncio.sleep(interval)


def eventually_sync(
    check: Callable[[], Any], timeout: float = 60.0, interval: float = 0.02, retry_on: Kinds = NOT_YET
) -> Any:
    """`eventually` for code without an event loop; the clock is the monotonic one.

    After a check that takes long, such as a command, it waits four times as long, a second at most: others need the CPU.
    """
    deadline = time.monotonic() + timeout
    while True:
        began = time.monotonic()
        try:
            value = check()
            if value:
                return value
            last = f"last value {value!r}"
        except retry_on as error:
            last = f"last exception {error!r}"
        pause = max(interval, min(1.0, 4 * (time.monotonic() - began)))
        if time.monotonic() + pause > deadline:
            _give_up(timeout, last)
        time.sleep(pause)


def _give_up(timeout: float, last: str) -> NoReturn:
    raise AssertionError(f"not satisfied within {timeout:g} s: {last}")
