"""What every service's `main` does: read its settings, begin to log, and serve until it is told to stop."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Protocol, TypeVar

from gpuscale.common.config.settings import DatabaseSettings, ProgramSettings, load
from gpuscale.common.config.sources import secret_variables
from gpuscale.common.rpc.server import Registration, Server
from gpuscale.common.runtime import logs
from gpuscale.common.runtime.lifecycle import run
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.secrets import take_variables
from gpuscale.common.store.term import Term

_log = get_logger(__name__)
S = TypeVar("S", bound=ProgramSettings)


def run_program(
    settings_type: type[S],
    serve: Callable[[S, asyncio.Event], Awaitable[None]],
    argv: Sequence[str] | None,
    *,
    program: str,
    description: str,
    quiet: bool = False,
) -> int:
    """Run a service as a program of its own.

    Args:
        settings_type: what it is told, by flags, variables and file.
        serve: the service; ends after the event, its `stop`, is set.
        argv: flags; None for those of the process.
        program: its name, as typed.
        description: what it does, for `--help`.
        quiet: it wakes up a few times a second only, see `lifecycle.run`.

    Returns:
        The exit code.
    """
    settings = load(settings_type, argv, program=program, description=description)
    logs.configure(settings.log_level, settings.log_format)
    take_variables(secret_variables(settings))
    return run(partial(serve, settings), program=program, quiet=quiet)


class Opening(Protocol):
    """Opens what a service does, and yields what a server is to serve; `term` where it leads by turns."""

    def __call__(self, *, term: Term | None) -> AbstractAsyncContextManager[Sequence[Registration]]:
        """Read its state and start its tasks; they end on leaving."""
        ...


async def serve_stateful(
    settings: DatabaseSettings,
    server: Server,
    *,
    services: Sequence[str],
    act: Opening,
    stop: asyncio.Event,
) -> None:
    """Serve what keeps a state until `stop` is set: at once, or with a database whenever this process leads.

    Args:
        settings: name the database, if there is one.
        server: neither bound nor started.
        services: full names of what `act` opens.
        act: the service.
        stop: ends it.

    Raises:
        GpuscaleError: the stored state, the database, or the address cannot be used.
    """
    address = server.bind()
    if settings.database is None:
        async with act(term=None) as registrations:
            server.add(*registrations)
            async with server:
                _log.info("serving", address=address)
                await stop.wait()
        return
    settings.require_driver()
    from gpuscale.common.rpc.standby import serve_by_turns
    from gpuscale.common.store.leadership import Candidate

    _log.info("standing by", address=address, database=str(settings.database))
    candidate = Candidate(settings.database, settings.section, settings.advertise_address or address)
    await serve_by_turns(server, candidate, services, lambda term: act(term=term), stop)
