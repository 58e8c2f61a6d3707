"""The program `gpuscalectl up`: runs everything until stopped, and prints a banner with what to type next."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from importlib.metadata import version

from gpuscale.api.types import v1 as types_api
from gpuscale.common.config.sources import secret_variables
from gpuscale.common.errors import FailedPreconditionError, GpuscaleError, InvalidArgumentError
from gpuscale.common.runtime import lifecycle, logs
from gpuscale.common.secrets import hide_memory, take_variables
from gpuscale.up import app
from gpuscale.up.settings import PROGRAM, UpSettings, load_all

DEFAULT_ADDRESS = "127.0.0.1:7070"


def banner(running: app.Running, settings: UpSettings) -> list[str]:
    """The lines of the banner."""
    minutes = 24 * 60 / settings.demo_speed
    day = f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.3g} h"
    return [
        f"gpuscale {version('gpuscale')} is up at {running.address}",
        f"  dashboard  {running.dashboard or f'gpuscalectl{_where(running)} dashboard'}",
        f"  data       {settings.data_dir}",
        f"  GPUs       {gpus(running.snapshot)}",
        *([f"  demo       made-up hosts and people; a day passes in {day}"] if settings.demo else []),
    ]


def gpus(snapshot: types_api.Snapshot) -> str:
    """`8 x NVIDIA H100`, `4 SIMULATED`, or the reason there are none."""
    if snapshot.simulated:
        return f"{len(snapshot.gpus)} SIMULATED: no hardware stands behind them"
    models = Counter(gpu.model for gpu in snapshot.gpus)
    found = ", ".join(f"{count} x {model}" for model, count in models.items())
    return found or f"none: {snapshot.gpu_problem or 'the driver reports none'}"


def hints(running: app.Running) -> list[str]:
    """Commands to type next, in a second shell."""
    where = _where(running)
    return [
        f"next:  gpuscalectl{where} get gpus",
        f"       gpuscalectl{where} reserve --gpus 1 --ttl 60s",
        "Ctrl-C ends it.",
    ]


def _where(running: app.Running) -> str:
    return "" if running.address == DEFAULT_ADDRESS else f" --address {running.address}"


def main(argv: Sequence[str]) -> int:
    """Run everything until SIGTERM or SIGINT and return the exit code.

    Raises:
        FailedPreconditionError: the address or the data directory is in use or cannot be used.
        InvalidArgumentError: invalid setting.
    """
    settings = load_all(argv)
    logs.configure(settings.up.log_level, settings.up.log_format, service=PROGRAM)
    logs.capture()
    take_variables(secret_variables(settings.up, settings.allocator, settings.autoscaler, settings.adapter))
    hide_memory()  # replicas run as the same user, and must not read our memory
    open_all = app.open_all  # reports a missing package
    refused: GpuscaleError | None = None

    async def serve(stop: asyncio.Event) -> None:
        nonlocal refused
        async with AsyncExitStack() as stack:
            try:
                running = await stack.enter_async_context(open_all(settings))
            except (FailedPreconditionError, InvalidArgumentError) as error:
                refused = error
                return
            sys.stdout.write("".join(f"{line}\n" for line in banner(running, settings.up)))
            sys.stdout.flush()
            sys.stderr.write("".join(f"{line}\n" for line in hints(running)))
            await stop.wait()

    code = lifecycle.run(serve, program=PROGRAM)
    if refused is not None:
        raise refused
    return code
