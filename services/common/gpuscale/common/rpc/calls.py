"""The calls that a server is handling: how many there may be, and how they are ended before their time."""

import asyncio
from collections.abc import Iterable
from typing import Any

from gpuscale.common.errors import GpuscaleError, ResourceExhaustedError, UnavailableError

OVERLOADED_RETRY = 1.0
"""Seconds after which a caller that was turned away should try again."""

_Task = asyncio.Task[Any]


class OpenCalls:
    """Calls by kind. Unary ones are limited in number; streams are not counted among them, since they stay.

    Calls of public methods (health) are neither limited nor refused while the server stops.
    """

    def __init__(self, max_unary: int) -> None:
        self._max_unary = max_unary
        self._stopping: GpuscaleError | None = None
        self._ended: dict[_Task, GpuscaleError] = {}
        self.unary: set[_Task] = set()
        self.streams: set[_Task] = set()
        self.public: set[_Task] = set()

    def enter_unary(self, task: _Task) -> None:
        """Count a unary call.

        Raises:
            ResourceExhaustedError: there are too many (reason OVERLOADED).
            UnavailableError: the server stops (reason SHUTTING_DOWN).
        """
        self._refuse_when_stopping()
        if len(self.unary) >= self._max_unary:
            raise ResourceExhaustedError(
                f"{self._max_unary} calls are being handled already",
                reason="OVERLOADED",
                retry_after=OVERLOADED_RETRY,
            )
        self.unary.add(task)

    def enter_stream(self, task: _Task) -> None:
        """Note an open stream.

        Raises:
            UnavailableError: the server stops (reason SHUTTING_DOWN).
        """
        self._refuse_when_stopping()
        self.streams.add(task)

    def leave(self, task: _Task) -> None:
        """A call is over, or was never let in."""
        self.unary.discard(task)
        self.streams.discard(task)
        self.public.discard(task)
        self._ended.pop(task, None)

    def end(self, tasks: Iterable[_Task], error: GpuscaleError) -> None:
        """Cancel calls that are open, so that each is answered with `error`."""
        for task in tuple(tasks):
            self._ended[task] = error
            task.cancel()

    def why_cancelled(self, task: _Task) -> GpuscaleError | None:
        """The error to answer a cancelled call with; None where it was not `end` that cancelled it."""
        return self._ended.get(task)

    def stop(self) -> GpuscaleError:
        """Refuse every call from now on; returns the error that does."""
        self._stopping = UnavailableError("the server is shutting down", reason="SHUTTING_DOWN")
        return self._stopping

    def _refuse_when_stopping(self) -> None:
        if self._stopping is not None:
            raise UnavailableError(self._stopping.message, reason=self._stopping.reason)
