"""The stage of a service that leads by turns: its methods are always served, and only a leader acts behind them.

A standby answers every call UNAVAILABLE, reason NOT_LEADER, with the leader's address as metadata `leader` where it is
known; so does a leader from the moment its term ends. Nothing was done of a call that was answered so.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeAlias

import grpc
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import MethodDescriptor

from gpuscale.common.errors import InternalError, UnavailableError
from gpuscale.common.rpc.handlers import HandlerList
from gpuscale.common.rpc.server import Registration
from gpuscale.common.store.term import Term

RETRY_AFTER = 0.2
"""Seconds after which a caller that was turned away should ask again: as often as a standby looks for the lead."""

# gRPC's class is generic to type checkers only.
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Context = grpc.aio.ServicerContext[Any, Any]


class Stage:
    """Serves `services` as those who are on stage do.

    Args:
        services: full names; their generated modules must have been imported.
        leader: tells the address of the leader; empty where it is not known.
    """

    def __init__(self, services: Sequence[str], leader: Callable[[], str]) -> None:
        self._services = tuple(services)
        self._leader = leader
        self._term: Term | None = None
        self._acting: Mapping[str, _Handler] = {}

    @property
    def registrations(self) -> tuple[Registration, ...]:
        """What a server is to serve, from its start to its end."""
        return tuple(Registration(service, partial(self._add, service)) for service in self._services)

    def enter(self, term: Term, registrations: Iterable[Registration]) -> None:
        """From now on calls go to these services, for as long as the term lasts.

        Raises:
            InternalError: they are not the services of this stage.
        """
        cast, names = HandlerList(), list[str]()
        for registration in registrations:
            registration.add(cast)
            names.append(registration.service)
        if sorted(names) != sorted(self._services):
            raise InternalError(f"{sorted(names)} act on a stage for {sorted(self._services)}")
        self._acting, self._term = cast.handlers, term

    def leave(self) -> None:
        """From now on calls are turned away."""
        self._acting, self._term = {}, None

    def refusal(self) -> UnavailableError:
        """What calls are answered by one that does not lead."""
        leader = self._leader()
        where = f"; {leader} does" if leader else ", and nobody is known that does"
        return UnavailableError(
            f"this process does not lead{where}",
            reason="NOT_LEADER",
            metadata={"leader": leader} if leader else {},
            retry_after=RETRY_AFTER,
        )

    def _add(self, service: str, server: grpc.aio.Server) -> None:
        """Add handlers of the right kinds for every method of a service."""
        methods = descriptor_pool.Default().FindServiceByName(service).methods
        handlers = {method.name: self._handler(f"/{service}/{method.name}", method) for method in methods}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))

    def _handler(self, path: str, method: MethodDescriptor) -> _Handler:
        async def answer(request: Any, context: _Context) -> Any:
            return await _behavior(self._find(path))(request, context)

        async def stream(request: Any, context: _Context) -> AsyncIterator[Any]:
            async with aclosing(_behavior(self._find(path))(request, context)) as responses:
                async for response in responses:
                    yield response

        decode = message_factory.GetMessageClass(method.input_type).FromString
        encode = message_factory.GetMessageClass(method.output_type).SerializeToString
        if method.server_streaming and method.client_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, decode, encode)
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(stream, decode, encode)
        if method.client_streaming:
            return grpc.stream_unary_rpc_method_handler(answer, decode, encode)
        return grpc.unary_unary_rpc_method_handler(answer, decode, encode)

    def _find(self, path: str) -> _Handler:
        """The handler of whoever acts.

        Raises:
            UnavailableError: NOT_LEADER.
        """
        if self._term is None or not self._term.leads():
            raise self.refusal()
        return self._acting[path]


def _behavior(handler: _Handler) -> Callable[[Any, _Context], Any]:
    """The servicer's method, of whichever kind."""
    kinds: tuple[Any, ...] = (
        handler.unary_unary,
        handler.unary_stream,
        handler.stream_unary,
        handler.stream_stream,
    )
    behavior: Callable[[Any, _Context], Any] = next(kind for kind in kinds if kind is not None)
    return behavior
