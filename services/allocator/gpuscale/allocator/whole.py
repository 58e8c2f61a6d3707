"""Whole: changes that are made to their end also where the caller gives up meanwhile.

The disk cannot be called back: what was on its way there is there after a restart, so it must be in memory as well.
"""

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

from gpuscale.common.errors import GpuscaleError
from gpuscale.common.runtime.lifecycle import TaskScope

T = TypeVar("T")


async def whole(tasks: TaskScope, name: str, work: Coroutine[object, object, T]) -> T:
    """Do all of a change, in a task of the scope; return or raise what it comes to.

    Raises:
        GpuscaleError: what the change raised.
    """
    outcome = await asyncio.shield(tasks.start(name, _outcome(work)))
    if isinstance(outcome, GpuscaleError):
        raise outcome
    return outcome


async def _outcome(work: Coroutine[object, object, T]) -> T | GpuscaleError:
    """What a change came to; its error, which would end the scope, as a value."""
    try:
        return await work
    except GpuscaleError as error:
        return error
