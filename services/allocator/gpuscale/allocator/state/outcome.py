"""Outcome: how a write went, for any number of callers who wait for it."""

import asyncio
from collections.abc import Callable, Generator
from typing import Any

from gpuscale.common.errors import UnavailableError

_Error = UnavailableError | None


class Outcome:
    """How a write went, once it is known; used from one event loop.

    A caller who gives up takes nothing away from the others, and the answer reaches all of them in the turn of the loop
    in which it is known (a shielded future takes two).
    """

    __slots__ = ("_error", "_known", "_listeners", "_waiters")

    def __init__(self) -> None:
        self._known = False
        self._error: _Error = None
        self._waiters: list[asyncio.Future[_Error]] = []
        self._listeners: list[Callable[[_Error], None]] = []

    def __await__(self) -> Generator[Any, None, _Error]:
        """None once the change is on disk and in the ledger; the error if it could not be written and was taken back."""
        if self._known:
            return self._error
        waiter: asyncio.Future[_Error] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return (yield from waiter)

    def on_settled(self, listener: Callable[[_Error], None]) -> None:
        """Call a listener when it is known; it must be quick and not raise."""
        self._listeners.append(listener)

    def settle(self, error: _Error) -> None:
        """Tell everybody; once."""
        self._known, self._error = True, error
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(error)
        for listener in self._listeners:
            listener(error)
