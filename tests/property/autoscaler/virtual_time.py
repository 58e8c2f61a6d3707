"""An event loop on virtual time: where it would wait, its time goes on instead. Nothing in it may use threads."""

import asyncio
import gc
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_INSTANT = 1e-5
"""Seconds that everything takes at least: no time is exact."""


class _Jumping(selectors.DefaultSelector):
    """Where a loop would wait, its time goes on instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        if not found:
            assert timeout is not None, "everybody waits for somebody"
            self.now += max(0.0, timeout) + _INSTANT
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on which a day passes in a moment; nothing in it may use threads."""

    def __init__(self) -> None:
        self.jumping = _Jumping()
        super().__init__(self.jumping)

    def time(self) -> float:
        return self.jumping.now


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run something to its end on virtual time.

    The collector waits until then: the end of a forgotten generator wakes the loop, at a moment that no seed decides.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(work)
    finally:
        if collects:
            gc.enable()
