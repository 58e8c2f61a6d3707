"""Changes that are made to their end also where the caller gives up meanwhile.

The disk cannot be called back: what was on its way there is there after a restart, so it must be in memory as well. A use
case that writes and then changes memory is marked with `uninterrupted`. Within a call, `Store.write` refuses to run
outside of such a use case, so a mark that is missing fails the first call and not one cancelled call in a thousand.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from gpuscale.common.errors import GpuscaleError, InternalError

P = ParamSpec("P")
T = TypeVar("T")

_interruptible: ContextVar[bool] = ContextVar("gpuscale_interruptible", default=False)


def begin_call() -> None:
    """For the guard of each method: from here on, whoever called may cancel the task at any await."""
    _interruptible.set(True)


def require_uninterrupted() -> None:
    """Check that no caller can cancel the task between a write and what follows it.

    Raises:
        InternalError: the use case lacks its `uninterrupted`.
    """
    if _interruptible.get():
        raise InternalError("a call writes outside of an uninterrupted use case")


def uninterrupted(
    change: Callable[P, Coroutine[Any, Any, T]],
) -> Callable[P, Coroutine[Any, Any, T]]:
    """Decorate a coroutine function whose caller may give up: a cancellation is raised once the change is complete.

    The change runs in a task of its own, which ends before the caller goes on. Each of its awaits must end by itself.
    """

    @wraps(change)
    async def complete(*args: P.args, **kwargs: P.kwargs) -> T:
        task = asyncio.create_task(_run(change(*args, **kwargs)), name=change.__qualname__)
        gave_up: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                gave_up = error
        if gave_up is not None and (task.cancelled() or _expected(task.exception())):
            raise gave_up
        return task.result()

    return complete


async def _run(change: Coroutine[Any, Any, T]) -> T:
    _interruptible.set(False)  # in the task's own copy of the context
    return await change


def _expected(error: BaseException | None) -> bool:
    """Whether a caller that has gone need not be told how the change went: a fault of ours is told all the same."""
    return error is None or isinstance(error, GpuscaleError)
