"""A program that leads by turns: it serves from its start to its end, and acts in between for as long as it leads."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import NoReturn

from gpuscale.common.errors import UnavailableError
from gpuscale.common.rpc.server import Registration, Server
from gpuscale.common.rpc.stage import Stage
from gpuscale.common.runtime.lifecycle import TaskScope
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.store.leadership import LOOK_PERIOD, Candidate
from gpuscale.common.store.term import Term

Opening = Callable[[Term], AbstractAsyncContextManager[Sequence[Registration]]]
"""Opens what acts in a term: reads its state, starts its tasks, and ends them on leaving."""

_log = get_logger(__name__)


async def serve_by_turns(
    server: Server, candidate: Candidate, services: Sequence[str], act: Opening, stop: asyncio.Event
) -> None:
    """Serve until `stop` is set; as a standby, and as the leader whenever nobody else leads.

    Args:
        server: bound, and not started.
        candidate: who stands for the lead.
        services: full names of what `act` opens.
        act: what the leader does.
        stop: ends it.

    Raises:
        FailedPreconditionError: the database lets us in under no circumstances, or `act` cannot work on what is there.
    """
    stage = Stage(services, lambda: candidate.leader)
    server.add(*stage.registrations)
    await server.report(serving=False)
    async with TaskScope() as tasks, server:
        tasks.spawn("lead by turns", _by_turns(server, candidate, stage, act))
        await stop.wait()


async def _by_turns(server: Server, candidate: Candidate, stage: Stage, act: Opening) -> NoReturn:
    while True:
        try:
            async with candidate.term() as term:
                _log.info("leading", epoch=term.epoch)
                async with act(term) as registrations:
                    await _hold(server, stage, term, registrations)
        except UnavailableError as error:
            _log.warning("leading came to an end", problem=error.message, reason=error.reason)
        await asyncio.sleep(LOOK_PERIOD)


async def _hold(server: Server, stage: Stage, term: Term, registrations: Sequence[Registration]) -> None:
    """Act until the term is over."""
    stage.enter(term, registrations)
    await server.report(serving=True)
    try:
        await term.over.wait()
    finally:
        stage.leave()
        server.end_calls(
            UnavailableError(
                "this process leads no more; the call may have been done",
                reason="LEAD_LOST",
                retry_after=LOOK_PERIOD,
            )
        )
        await server.report(serving=False)
    _log.warning("leading no more", epoch=term.epoch)
