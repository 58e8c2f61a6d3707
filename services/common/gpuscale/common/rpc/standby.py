"""A program with standbys: it always serves, and runs the service only while it leads.

A standby forwards calls to the leader. It rejects calls of clients that follow the leader themselves, calls already forwarded,
and all calls while the leader is unknown: UNAVAILABLE, reason NOT_LEADER, with the leader's address, if known, in the metadata
`leader`. A leader does the same as soon as its term ends. A call rejected so was not executed.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NoReturn

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor

from gpuscale.common import wire
from gpuscale.common.errors import FailedPreconditionError, GpuscaleError, InternalError, UnavailableError
from gpuscale.common.rpc.forwarder import STREAMS, Forwarder, Lanes, Metadata, Upstream
from gpuscale.common.rpc.interceptor import Handler, behavior_of, handler_of
from gpuscale.common.rpc.meter import counted_elsewhere
from gpuscale.common.rpc.server import HandlerCollector, Registration, Server
from gpuscale.common.rpc.status import LEADER_KEY
from gpuscale.common.rpc.wrapped_channel import FOLLOWS, never_sent
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import Backoff, TaskScope
from gpuscale.common.security.auth import FORWARDED_KEY, Context, Principal, current_principal, is_admin
from gpuscale.common.security.signed_callers import MOST_BYTES, seal, unseal
from gpuscale.common.store.leadership import LOOK_PERIOD, Candidate
from gpuscale.common.store.term import Lead, Term

MOST_STREAMS: Final = 4 * STREAMS
"""Maximum streams that a standby forwards; callers of more are told to retry."""
RETRY_AFTER: Final = 0.2
"""Seconds after which a rejected caller should retry; a standby looks for the lead as often."""

LONGEST_WAIT: Final = 5.0
"""Longest wait in seconds before another term, after those that could not begin."""

_KEPT_HERE: Final = frozenset({FORWARDED_KEY, FOLLOWS[0]})


def not_leader(leader: str, problem: str = "") -> UnavailableError:
    """The error of a process that does not lead: nothing was done. `leader` is the leader's address, or empty; `problem`, why."""
    where = f"; {leader} does" if leader else "; the leader is not known" + (problem and f": {problem}")
    return UnavailableError(
        f"this process does not lead{where}",
        reason="NOT_LEADER",
        metadata={"leader": leader} if leader else {},
        retry_after=RETRY_AFTER,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leader(Upstream):
    """The leader of a term as the upstream of a standby."""

    lead: Lead

    def caller(self, path: str) -> Metadata:
        sealed = seal(self.lead.epoch, self.lead.secret, path, current_principal())
        if len(sealed) > MOST_BYTES:
            raise not_leader(self.lead.address)
        counted_elsewhere.set(True)  # the leader counts and audits the call
        return ((FORWARDED_KEY, sealed),)

    def failure(self, error: grpc.aio.AioRpcError | None) -> UnavailableError:
        counted_elsewhere.set(False)
        if error is not None and never_sent(error):
            return not_leader(self.lead.address)
        return UnavailableError(
            "the leader was lost; the call may have been executed",
            reason="LEAD_LOST",
            retry_after=RETRY_AFTER,
        )


class Relay:
    """Forwards calls to the current leader, over channels to its address. Call `end` last."""

    def __init__(self, services: Sequence[str], open_channel: Callable[[str], grpc.aio.Channel]) -> None:
        self._services = services
        self._open = open_channel
        self._lead: Lead | None = None
        self._known = False
        self._forwarder = Forwarder({})
        self._connections = AsyncExitStack()

    def handler(self, details: grpc.HandlerCallDetails) -> "Handler | None":
        """The forwarding handler of a call; None if it was forwarded before, or its caller follows the leader."""
        if not self._known or any(key in _KEPT_HERE for key, _ in details.invocation_metadata or ()):
            return None
        return self._forwarder.service(details)

    async def follow(self, lead: Lead | None) -> None:
        """Forward calls to a new leader; open calls to the previous one end with LEAD_LOST.

        While the leader is unknown (None), open calls continue.
        """
        self._known = lead is not None
        if lead is None or lead == self._lead:
            return
        await self.end()
        self._lead = lead
        try:
            channel = await self._connections.enter_async_context(self._open(lead.address))
        except GpuscaleError as error:
            _log.warning("cannot call the leader", leader=lead.address, problem=error.message)
            return
        streams = await self._connections.enter_async_context(
            Lanes(partial(self._open, lead.address), MOST_STREAMS)
        )
        leader = _Leader("leader", channel, streams, private=False, lead=lead)
        self._forwarder = Forwarder(dict.fromkeys(self._services, leader))

    async def end(self) -> None:
        """Stop to forward; open calls end with LEAD_LOST."""
        self._lead, self._forwarder = None, Forwarder({})
        await self._connections.aclose()


Opening = Callable[[Term], AbstractAsyncContextManager[Sequence[Registration]]]
"""Opens the service for a term: reads its state and starts its tasks; leaving the context ends them."""

_log = get_logger(__name__)


class LeaderMethods:
    """The methods of services that only the leader runs; their generated modules must be imported.

    `refusal` returns the error for calls while this process does not lead.
    """

    def __init__(self, services: Sequence[str], refusal: Callable[[], UnavailableError]) -> None:
        self._services = tuple(services)
        self.refusal = refusal
        self._term: Term | None = None
        self._handlers: Mapping[str, Handler] = {}

    @property
    def registrations(self) -> tuple[Registration, ...]:
        """The services for the server."""

        def add(service: str, server: grpc.aio.Server) -> None:
            methods = wire.find_service(service).methods
            handlers = {method.name: self._handler(f"/{service}/{method.name}", method) for method in methods}
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))

        return tuple(Registration(service, partial(add, service)) for service in self._services)

    def begin(self, term: Term, registrations: Iterable[Registration]) -> None:
        """Run calls in these services until the term ends. Raises InternalError: they are not the registered ones."""
        collector, names = HandlerCollector(), list[str]()
        for registration in registrations:
            collector.add(registration)
            names.append(registration.service)
        if sorted(names) != sorted(self._services):
            raise InternalError(f"{sorted(names)} lead, where {sorted(self._services)} are served")
        self._handlers, self._term = collector.handlers, term

    def end(self) -> None:
        """Reject calls from now on."""
        self._handlers, self._term = {}, None

    def open_forwarded(self, path: str, values: Sequence[str | bytes]) -> Principal:
        """The caller that a standby names.

        Raises:
            UnauthenticatedError: the metadata is not from a standby of this service.
            UnavailableError: NOT_LEADER, or the standby means another term.
        """
        term = self._term
        found = None
        if term is not None and term.leads():
            found = unseal(term.epoch, term.lead.secret, path, values)
        if found is None:
            raise self.refusal()
        return found

    def _handler(self, path: str, method: MethodDescriptor) -> Handler:
        async def answer(request: Any, context: Context) -> Any:
            behavior = behavior_of(self._find(path))
            if self._term is not None and is_admin():
                named = (LEADER_KEY, self._term.lead.address)
                context.set_trailing_metadata((*context.trailing_metadata(), named))
            return await behavior(request, context)

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            async with aclosing(behavior_of(self._find(path))(request, context)) as responses:
                async for response in responses:
                    yield response

        decode = message_factory.GetMessageClass(method.input_type).FromString
        encode = message_factory.GetMessageClass(method.output_type).SerializeToString
        behavior = stream if method.server_streaming else answer
        return handler_of(method.client_streaming, method.server_streaming, behavior, decode, encode)

    def _find(self, path: str) -> Handler:
        """The handler of the service while this process leads."""
        if self._term is None or not self._term.leads():
            raise self.refusal()
        return self._handlers[path]


async def serve_by_turns(
    server: Server,
    candidate: Candidate,
    services: Sequence[str],
    act: Opening,
    stop: asyncio.Event,
    open_channel: Callable[[str], grpc.aio.Channel],
) -> None:
    """Serve until `stop` is set, as the leader whenever nobody else leads, else as a standby.

    Args:
        server: bound, not started.
        candidate: competes for the lead.
        services: full names of the services that `act` opens.
        act: opens the service for a term.
        stop: ends it.
        open_channel: opens a channel to the leader, for forwarding.

    Raises:
        FailedPreconditionError: the database refuses us, or `act` cannot use the state.
    """

    def refusal() -> UnavailableError:
        problem = candidate.problem
        return not_leader(
            candidate.leader, problem if is_admin() else problem and "its database cannot be used"
        )

    methods = LeaderMethods(services, refusal)
    relay = Relay(services, open_channel)
    server.add(*methods.registrations)
    server.forward(relay.handler, methods.open_forwarded)
    await server.report(serving=False)

    async def lead_by_turns() -> FailedPreconditionError:
        """Returns what keeps this process from leading for good: raised in a task it would have a traceback in the log."""
        backoff = Backoff(LOOK_PERIOD, LONGEST_WAIT)
        while True:
            try:
                async with candidate.term() as term:
                    _log.info("leading", epoch=term.epoch)
                    await relay.end()
                    async with act(term) as registrations:
                        backoff.reset()
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
            except UnavailableError as error:
                _log.warning("the term ended", problem=error.message, reason=error.reason)
            except FailedPreconditionError as error:
                return error
            await asyncio.sleep(backoff.next())

    async def follow() -> NoReturn:
        while True:
            await relay.follow(candidate.other)
            await asyncio.sleep(LOOK_PERIOD)

    async with AsyncExitStack() as stack:
        stack.push_async_callback(relay.end)
        tasks = await stack.enter_async_context(TaskScope())
        await stack.enter_async_context(server)
        tasks.spawn("follow the leader", follow())
        leading = tasks.start("lead by turns", lead_by_turns())
        stopped = tasks.start("wait for the stop", stop.wait())
        await asyncio.wait((leading, stopped), return_when=asyncio.FIRST_COMPLETED)
        if leading.done():
            raise leading.result()
