"""What every service's `main` does: read its settings, begin to log, and serve until it is told to stop."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from gpuscale.common import logs
from gpuscale.common.lifecycle import run
from gpuscale.common.settings import ProgramSettings, load

S = TypeVar("S", bound=ProgramSettings)


def run_program(
    settings_type: type[S],
    serve: Callable[[S, asyncio.Event], Awaitable[None]],
    argv: Sequence[str] | None,
    *,
    program: str,
    description: str,
) -> int:
    """Run a service as a program of its own.

    Args:
        settings_type: what it is told, by flags, variables and file.
        serve: the service; ends after the event, its `stop`, is set.
        argv: flags; None for those of the process.
        program: its name, as typed.
        description: what it does, for `--help`.

    Returns:
        The exit code.
    """
    settings = load(settings_type, argv, program=program, description=description)
    logs.configure(settings.log_level, settings.log_format)
    return run(partial(serve, settings), program=program)
