"""The server of every program: one address for any number of services, with health, TLS, limits and an orderly end."""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import grpc

from gpuscale.common.errors import FailedPreconditionError, GpuscaleError
from gpuscale.common.rpc.call_watching import CallMeter, CallWatcher
from gpuscale.common.rpc.calls import OpenCalls
from gpuscale.common.rpc.guard import GuardSettings
from gpuscale.common.rpc.handlers import HandlerCollector, add_reflection
from gpuscale.common.rpc.health import Health
from gpuscale.common.rpc.interceptor import GuardInterceptor
from gpuscale.common.rpc.limits import SERVER_ARGUMENTS
from gpuscale.common.rpc.rate_limits import RateLimits
from gpuscale.common.runtime.connections import Connections
from gpuscale.common.security.audit import AuditLog, AuditOptions
from gpuscale.common.security.auth import Authenticator
from gpuscale.common.security.bind import ListenAddress, bind_error, check_exposure, parse_listen
from gpuscale.common.security.tls import ServerTls, server_credentials

HEALTH_NOTICE: Final = 0.1
"""Seconds that health watchers have to read NOT_SERVING before their streams end."""
HARD_STOP: Final = 2.0
"""Seconds for calls to end after they were told to, before their connections are cut."""


@dataclass(frozen=True)
class Registration:
    """A service and how it is added: `Registration("gpuscale.api....FleetService", partial(add_..., servicer))`."""

    service: str
    add: Callable[[grpc.aio.Server], None]


@dataclass(frozen=True)
class ServerOptions:
    """How a server listens.

    Attributes:
        listen: HOST:PORT; port 0 takes a free one. Other hosts than loopback need TLS.
        tls: certificate files; None for plain text.
        insecure_allow_remote: serve other hosts in plain text all the same.
        unix_socket: additionally listen there, for whoever has the authenticator's `internal_token`.
        reflection: let tools ask for the contract.
        max_concurrent_unary: unary calls handled at once; further ones are answered RESOURCE_EXHAUSTED.
        default_deadline: seconds for unary calls that come without a deadline.
        calls_per_second: how often each caller may call in the long run; 0 for as often as it likes.
        audit: where changes and refusals are noted; None for nowhere.
    """

    listen: str = "127.0.0.1:0"
    tls: ServerTls | None = None
    insecure_allow_remote: bool = False
    unix_socket: Path | None = None
    reflection: bool = False
    max_concurrent_unary: int = 512
    default_deadline: float = 30.0
    calls_per_second: float = 0.0
    audit: AuditOptions | None = None


class Server:
    """Serves the services that were added, from `start` to `stop`; an async context manager does both.

    Args:
        options: how it listens.
        authenticator: who is let in.
        meter: where calls are counted; None for nowhere.
    """

    def __init__(
        self, options: ServerOptions, authenticator: Authenticator, meter: CallMeter | None = None
    ) -> None:
        self._options = options
        self._audit = None if options.audit is None else AuditLog(options.audit)
        self._calls = OpenCalls(options.max_concurrent_unary)
        watcher = _watcher(options.calls_per_second, self._audit, meter)
        self._connections = meter.connections if meter is not None else Connections()
        self._port = 0
        self._watch: asyncio.Task[None] | None = None
        settings = GuardSettings(
            authenticator, self._calls, options.default_deadline, watcher, self._connections
        )
        self._server = grpc.aio.server(
            interceptors=[GuardInterceptor(settings)], options=list(SERVER_ARGUMENTS)
        )
        self._handlers = HandlerCollector(self._server)
        self._health = Health()
        self._services: list[str] = []
        self._serving = True
        self._health.add_to(self._handlers)

    def add(self, *registrations: Registration) -> None:
        """Add services; before `start`."""
        for registration in registrations:
            registration.add(self._handlers)
            self._services.append(registration.service)

    def add_generic(self, handler: grpc.GenericRpcHandler, services: Iterable[str]) -> None:
        """Add a handler of whole services, such as one that forwards; before `start`."""
        self._handlers.add_generic_rpc_handlers((handler,))
        self._services += services

    def bind(self) -> str:
        """Take the address, and the unix socket if one is configured. Calls are answered after `start`.

        Returns:
            The address with the port that was taken, such as "127.0.0.1:7070".

        Raises:
            FailedPreconditionError: ADDRESS_IN_USE; BIND_FAILED; INSECURE_BIND where TLS is needed; TLS_FILES.
            InvalidArgumentError: the address is none.
        """
        address = parse_listen(self._options.listen)
        check_exposure(
            address,
            tls=self._options.tls is not None,
            insecure_allow_remote=self._options.insecure_allow_remote,
        )
        try:
            if self._options.tls is None:
                port = self._server.add_insecure_port(str(address))
            else:
                port = self._server.add_secure_port(str(address), server_credentials(self._options.tls))
        except RuntimeError as error:
            raise bind_error(address) from error
        if self._options.unix_socket is not None:
            self._bind_socket(self._options.unix_socket)
        self._port = port
        return str(ListenAddress(address.host, port))

    async def start(self) -> None:
        """Begin to answer calls.

        Raises:
            FailedPreconditionError: the audit log cannot be written (reason AUDIT_FILE).
        """
        if self._audit is not None:
            self._audit.start()
        if self._options.reflection:
            add_reflection(self._handlers, self._services)
        await self._health.report(self._services, serving=self._serving)
        await self._server.start()
        self._watch = asyncio.create_task(self._connections.watch(self._port), name="watch connections")

    async def report(self, *, serving: bool) -> None:
        """Tell health checks whether the services are served: they are, unless this said otherwise, before `start` too."""
        self._serving = serving
        await self._health.report(self._services, serving=serving)

    def end_calls(self, error: GpuscaleError) -> None:
        """End every call that is open, but for health checks, with an error."""
        self._calls.end((*self._calls.streams, *self._calls.unary), error)

    async def stop(self, grace: float = 5.0) -> None:
        """Tell health watchers, refuse new calls, end streams, and let unary calls finish for `grace` seconds.

        Calls that are refused, or have to end before their time, are answered UNAVAILABLE, reason SHUTTING_DOWN: repeating
        them elsewhere is safe where they may be repeated at all. The connections are closed last: gRPC core answers what
        arrives while it closes with CANCELLED. Takes at most `grace` + 4.1 s, and usually no longer than the calls.
        """
        with suppress(TimeoutError):  # a watcher that does not read may keep the health service waiting
            async with asyncio.timeout(HARD_STOP):
                await self._health.stop()
        calls, error = self._calls, self._calls.stop()
        calls.end(calls.streams, error)
        if calls.unary:
            await asyncio.wait(calls.unary, timeout=grace)
        calls.end(calls.unary, error)
        if calls.public:
            await asyncio.wait(calls.public, timeout=HEALTH_NOTICE)
        calls.end(calls.public, error)
        await self._server.stop(HARD_STOP)
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        if self._audit is not None:
            await asyncio.to_thread(self._audit.close)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _bind_socket(self, path: Path) -> None:
        try:
            self._server.add_insecure_port(
                f"unix:{path}"
            )  # gRPC removes a socket left behind, and its own at the end
        except RuntimeError as error:
            raise FailedPreconditionError(f"cannot listen on {path}", reason="BIND_FAILED") from error


def _watcher(calls_per_second: float, audit: AuditLog | None, meter: CallMeter | None) -> CallWatcher | None:
    """What looks at each call; None where there is nothing to look for."""
    if not calls_per_second and audit is None and meter is None:
        return None
    limits = RateLimits(calls_per_second) if calls_per_second else None
    return CallWatcher(limits, audit, meter)
