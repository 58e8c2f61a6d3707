"""`gpuscalectl up` as a program: settings, then everything, until it is told to stop."""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack

from gpuscale.common.config.sources import secret_variables
from gpuscale.common.errors import FailedPreconditionError, GpuscaleError, InvalidArgumentError
from gpuscale.common.runtime import logs
from gpuscale.common.runtime.lifecycle import run
from gpuscale.common.secrets import hide_memory, take_variables
from gpuscale.up.app import Running, open_all
from gpuscale.up.banner import banner, hints
from gpuscale.up.settings import PROGRAM, UpSettings, load_all


def main(argv: Sequence[str]) -> int:
    """Run everything until SIGTERM or SIGINT and return the exit code.

    Raises:
        FailedPreconditionError: it did not start, because the address or the data directory is in use or cannot be used.
        InvalidArgumentError: a setting is wrong.
    """
    settings = load_all(argv)
    logs.configure(settings.up.log_level, settings.up.log_format)
    take_variables(secret_variables(settings.up, settings.allocator, settings.autoscaler, settings.adapter))
    hide_memory()  # replicas run as the same user
    refused: GpuscaleError | None = None

    async def serve(stop: asyncio.Event) -> None:
        nonlocal refused
        async with AsyncExitStack() as stack:
            try:
                running = await stack.enter_async_context(open_all(settings))
            except (FailedPreconditionError, InvalidArgumentError) as error:
                refused = error
                return
            _announce(running, settings.up)
            await stop.wait()

    code = run(serve, program=PROGRAM)
    if refused is not None:
        raise refused
    return code


def _announce(running: Running, settings: UpSettings) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in banner(running, settings)))
    sys.stdout.flush()
    sys.stderr.write("".join(f"{line}\n" for line in hints(running)))
