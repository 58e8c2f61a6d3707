"""A program that leads by turns: it serves from its start to its end, and acts in between for as long as it leads.

Its methods are always served. A standby answers every call UNAVAILABLE, reason NOT_LEADER, with the leader's address as
metadata `leader` where it is known; so does a leader from the moment its term ends. Nothing was done of a call that was
answered so.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from functools import partial
from typing import Any, NoReturn

import grpc
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import MethodDescriptor

from gpuscale.common.errors import InternalError, UnavailableError
from gpuscale.common.rpc.interceptor import Handler, behavior_of, handler_of
from gpuscale.common.rpc.server import HandlerCollector, Registration, Server
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import TaskScope
from gpuscale.common.security.auth import Context
from gpuscale.common.store.leadership import LOOK_PERIOD, Candidate
from gpuscale.common.store.term import Term

RETRY_AFTER = 0.2
"""Seconds after which a caller that was turned away should ask again: as often as a standby looks for the lead."""

Opening = Callable[[Term], AbstractAsyncContextManager[Sequence[Registration]]]
"""Opens what the leader does in a term: reads its state, starts its tasks, and ends them on leaving."""

_log = get_logger(__name__)


class LeaderMethods:
    """The methods of services that only the leader answers.

    Args:
        services: full names; their generated modules must have been imported.
        leader: tells the address of the leader; empty where it is not known.
    """

    def __init__(self, services: Sequence[str], leader: Callable[[], str]) -> None:
        self._services = tuple(services)
        self._leader = leader
        self._term: Term | None = None
        self._handlers: Mapping[str, Handler] = {}

    @property
    def registrations(self) -> tuple[Registration, ...]:
        """What a server is to serve, from its start to its end."""

        def add(service: str, server: grpc.aio.Server) -> None:
            methods = descriptor_pool.Default().FindServiceByName(service).methods
            handlers = {method.name: self._handler(f"/{service}/{method.name}", method) for method in methods}
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))

        return tuple(Registration(service, partial(add, service)) for service in self._services)

    def begin(self, term: Term, registrations: Iterable[Registration]) -> None:
        """From now on calls go to these services, for as long as the term lasts.

        Raises:
            InternalError: they are not those that are served.
        """
        collector, names = HandlerCollector(), list[str]()
        for registration in registrations:
            collector.add(registration)
            names.append(registration.service)
        if sorted(names) != sorted(self._services):
            raise InternalError(f"{sorted(names)} lead, where {sorted(self._services)} are served")
        self._handlers, self._term = collector.handlers, term

    def end(self) -> None:
        """From now on calls are turned away."""
        self._handlers, self._term = {}, None

    def refusal(self) -> UnavailableError:
        """The answer to a call of a process that does not lead."""
        leader = self._leader()
        where = f"; {leader} does" if leader else "; the leader is not known"
        return UnavailableError(
            f"this process does not lead{where}",
            reason="NOT_LEADER",
            metadata={"leader": leader} if leader else {},
            retry_after=RETRY_AFTER,
        )

    def _handler(self, path: str, method: MethodDescriptor) -> Handler:
        async def answer(request: Any, context: Context) -> Any:
            return await behavior_of(self._find(path))(request, context)

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            async with aclosing(behavior_of(self._find(path))(request, context)) as responses:
                async for response in responses:
                    yield response

        decode = message_factory.GetMessageClass(method.input_type).FromString
        encode = message_factory.GetMessageClass(method.output_type).SerializeToString
        behavior = stream if method.server_streaming else answer
        return handler_of(method.client_streaming, method.server_streaming, behavior, decode, encode)

    def _find(self, path: str) -> Handler:
        """The handler of the leader.

        Raises:
            UnavailableError: NOT_LEADER.
        """
        if self._term is None or not self._term.leads():
            raise self.refusal()
        return self._handlers[path]


async def serve_by_turns(
    server: Server, candidate: Candidate, services: Sequence[str], act: Opening, stop: asyncio.Event
) -> None:
    """Serve until `stop` is set: as a standby, and as the leader whenever nobody else leads.

    Args:
        server: bound, and not started.
        candidate: who stands for the lead.
        services: full names of what `act` opens.
        act: what the leader does.
        stop: ends it.

    Raises:
        FailedPreconditionError: the database lets us in under no circumstances, or `act` cannot work on what is there.
    """
    methods = LeaderMethods(services, lambda: candidate.leader)
    server.add(*methods.registrations)
    await server.report(serving=False)

    async def lead_by_turns() -> NoReturn:
        while True:
            try:
                async with candidate.term() as term:
                    _log.info("leading", epoch=term.epoch)
                    async with act(term) as registrations:
                        await _hold(server, methods, term, registrations)
            except UnavailableError as error:
                _log.warning("the term ended", problem=error.message, reason=error.reason)
            await asyncio.sleep(LOOK_PERIOD)

    async with TaskScope() as tasks, server:
        tasks.spawn("lead by turns", lead_by_turns())
        await stop.wait()


async def _hold(
    server: Server, methods: LeaderMethods, term: Term, registrations: Sequence[Registration]
) -> None:
    """Serve as the leader until the term is over."""
    methods.begin(term, registrations)
    await server.report(serving=True)
    try:
        await term.over.wait()
    finally:
        methods.end()
        server.end_calls(
            UnavailableError(
                "this process no longer leads; the call may have been executed",
                reason="LEAD_LOST",
                retry_after=LOOK_PERIOD,
            )
        )
        await server.report(serving=False)
    _log.warning("no longer leading", epoch=term.epoch)
