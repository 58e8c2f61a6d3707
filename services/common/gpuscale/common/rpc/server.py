"""The server of every program: one address for any number of services, with health, TLS, limits and an orderly end.

Below it: the addresses to listen on, the standard health service (grpc.health.v1), and what services are added to.
"""

import asyncio
import errno
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, Self, cast

import grpc
from google.protobuf import descriptor_pool

from gpuscale.common import wire
from gpuscale.common.errors import FailedPreconditionError, GpuscaleError, InvalidArgumentError
from gpuscale.common.rpc.audit import AuditLog, AuditOptions
from gpuscale.common.rpc.calls import Connections, RateLimits
from gpuscale.common.rpc.channel import (
    COMMON_ARGUMENTS,
    MAX_STREAMS_PER_CONNECTION,
    ChannelArguments,
    is_local,
)
from gpuscale.common.rpc.interceptor import Divert, Guards, GuardSettings, Handler, OpenCalls
from gpuscale.common.rpc.meter import CallMeter, CallWatcher
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.security.auth import Authenticator, Principal
from gpuscale.common.security.tls import ServerTls, server_credentials

# grpcio-health-checking has no types.
_health: Final[Any] = import_module("grpc_health.v1.health")
_health_pb2: Final[Any] = import_module("grpc_health.v1.health_pb2")
_health_grpc: Final[Any] = import_module("grpc_health.v1.health_pb2_grpc")

SERVER_ARGUMENTS: Final[ChannelArguments] = (
    ("grpc.so_reuseport", 0),  # a second server on the port must fail, not share it silently
    # Core's default refuses calls at random from about 1,000 that wait; thousands of agents may come back at once.
    ("grpc.server.max_pending_requests", 20_000),
    ("grpc.server.max_pending_requests_hard_limit", 40_000),
    # Core ends what a busy loop has not taken within 30 s, with a bare CANCELLED: a caller's own deadline says how long it waits.
    ("grpc.server_max_unrequested_time_in_server", 86_400),
    ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
    *COMMON_ARGUMENTS,
    # Agents ping each 20 s: core's default (5 min) would close their connections for too many pings.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Core would ping whoever sends, to measure the link: each agent, each second. What comes in here is small.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.max_connection_age_ms", 3_600_000),  # so that renewed certificates count
    ("grpc.max_connection_age_grace_ms", 60_000),
)

HEALTH_NOTICE: Final = 0.1
"""Seconds that health watchers have to read NOT_SERVING before their streams end."""
HARD_STOP: Final = 2.0
"""Seconds for calls to end after they were told to, before their connections are cut."""

_MAX_PORT = 65_535
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """A host and port; `host` is without brackets."""

    host: str
    port: int

    @property
    def loopback(self) -> bool:
        """Whether only this host can reach it. Any name other than localhost may resolve to anything."""
        return is_local(str(self))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_listen(listen: str, field: str = "listen") -> ListenAddress:
    """Read HOST:PORT or [IPV6]:PORT, which `field` says. Raises InvalidArgumentError: it is neither."""
    host, colon, port = listen.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    valid_port = port.isascii() and port.isdigit() and int(port) <= _MAX_PORT
    if not (colon and host and valid_port) or (":" in host) != bracketed:
        raise InvalidArgumentError(f"{listen!r} is not an address to listen on; write HOST:PORT", field=field)
    return ListenAddress(host, int(port))


def check_exposure(address: ListenAddress, *, tls: bool, insecure_allow_remote: bool) -> None:
    """Refuse to serve other hosts in plain text, unless the settings allow it.

    Raises:
        FailedPreconditionError: it was not (reason INSECURE_BIND).
    """
    if tls or address.loopback:
        return
    if not insecure_allow_remote:
        raise FailedPreconditionError(
            f"{address} can be reached from other hosts: configure TLS, or set insecure_allow_remote",
            reason="INSECURE_BIND",
        )
    _log.warning(
        "serving other hosts in plain text: anyone on the network can eavesdrop", listen=str(address)
    )


def bind_error(address: ListenAddress) -> FailedPreconditionError:
    """Why an address could not be bound. gRPC does not say, so this tries the address once more."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return FailedPreconditionError(f"another program listens on {address}", reason="ADDRESS_IN_USE")
        return FailedPreconditionError(f"cannot listen on {address}: {error.strerror}", reason="BIND_FAILED")
    return FailedPreconditionError(f"cannot listen on {address}", reason="BIND_FAILED")


@dataclass(frozen=True)
class Registration:
    """A service and how it is added: `Registration("gpuscale.api....FleetService", partial(add_..., servicer))`."""

    service: str
    add: Callable[[grpc.aio.Server], None]


class HandlerCollector:
    """What services are added to in place of a server: passes their handlers on as generic ones, and keeps them.

    Generated code registers every method a second time with gRPC core. A grpc.aio server then waits for as many calls as
    there are methods, which costs a fifth of its throughput with forty of them (measured with grpcio 1.85.1).

    Args:
        guards: what the handlers are for; None where somebody else serves them.

    Attributes:
        handlers: by path of the method.
    """

    def __init__(self, guards: Guards | None = None) -> None:
        self.handlers: dict[str, Handler] = {}
        self._guards = guards

    def add(self, registration: Registration) -> None:
        """Add a service; of a server, generated code calls nothing but the two methods below."""
        registration.add(cast("grpc.aio.Server", self))

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Pass on the handlers of a whole service."""
        if self._guards is not None:
            self._guards.add(generic_rpc_handlers)

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: Mapping[str, Handler]
    ) -> None:
        """Keep the handlers of a service."""
        for name, handler in method_handlers.items():
            self.handlers[f"/{service_name}/{name}"] = handler


@dataclass(frozen=True)
class ServerOptions:
    """How a server listens."""

    listen: str = "127.0.0.1:0"  # HOST:PORT; port 0 takes a free one. Other hosts than loopback need TLS
    tls: ServerTls | None = None  # certificate files; None for plain text
    insecure_allow_remote: bool = False  # serve other hosts in plain text all the same
    # name of an abstract unix socket to listen on too, for whoever has the authenticator's `internal_token`.
    # Nobody else can take its place while the server listens, as they could with a path (docs/adr/0020)
    internal_socket: str = ""
    # path of a unix socket to listen on too, for every process of this host: the authenticator's
    # `socket_role` says what they may do there
    socket: Path | None = None
    reflection: bool = False  # let tools ask for the contract
    max_concurrent_unary: int = (
        512  # unary calls handled at once; further ones are answered RESOURCE_EXHAUSTED
    )
    default_deadline: float = 30.0  # seconds for unary calls that come without a deadline
    calls_per_second: float = (
        0.0  # how often each caller may call in the long run; 0 for as often as it likes
    )
    audit: AuditOptions | None = None  # where changes and refusals are noted; None for nowhere
    health_listen: str = ""  # HOST:PORT of health checks alone, in plain text for anyone; empty for none


def bind_health(listen: str, servicer: Any = None) -> tuple[grpc.aio.Server, int]:
    """A server of Check alone, for probes that speak no TLS, such as a kubelet's, and its port.

    The caller starts it, and watches its connections. Nothing that a caller can keep open, such as a Watch or half a request,
    is in the way of other checks.

    Args:
        listen: HOST:PORT.
        servicer: what answers; where None the program is SERVING.

    Raises:
        FailedPreconditionError: ADDRESS_IN_USE or BIND_FAILED.
        InvalidArgumentError: the address is none; names it.
    """
    address = parse_listen(listen, "health_listen")
    server = grpc.aio.server(options=list(SERVER_ARGUMENTS))
    check = grpc.unary_unary_rpc_method_handler(
        (servicer or _health.aio.HealthServicer()).Check,
        _health_pb2.HealthCheckRequest.FromString,
        _health_pb2.HealthCheckResponse.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler(_health.SERVICE_NAME, {"Check": check})
    server.add_generic_rpc_handlers((handler,))
    try:
        port = server.add_insecure_port(str(address))
    except RuntimeError as error:
        raise bind_error(address) from error
    return server, port


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
        limits = RateLimits(options.calls_per_second) if options.calls_per_second else None
        watched = limits is not None or self._audit is not None or meter is not None
        watcher = CallWatcher(limits, self._audit, meter) if watched else None
        self._connections = Connections()
        self._ports: list[int] = []
        self._meter = meter
        self._watches: list[asyncio.Task[None]] = []
        self._probed: grpc.aio.Server | None = None
        settings = GuardSettings(
            authenticator, self._calls, options.default_deadline, watcher, self._connections
        )
        self._authenticator = authenticator
        self._guards = Guards(settings)
        self._server = grpc.aio.server(options=list(SERVER_ARGUMENTS))
        self._server.add_generic_rpc_handlers((self._guards,))
        self._handlers = HandlerCollector(self._guards)
        self._health: Any = _health.aio.HealthServicer()
        self._services: list[str] = []
        self._serving = True
        _health_grpc.add_HealthServicer_to_server(self._health, self._handlers)
        if options.audit is not None:
            from gpuscale.api.audit import v1 as audit_api
            from gpuscale.common.rpc.audit_servicer import AuditServicer  # 0.4 MB with its filters

            add = partial(audit_api.add_AuditServiceServicer_to_server, AuditServicer(options.audit))
            self.add(Registration("gpuscale.api.audit.v1.AuditService", add))

    def add(self, *registrations: Registration) -> None:
        """Add services; before `start`."""
        for registration in registrations:
            self._handlers.add(registration)
            self._services.append(registration.service)

    def add_generic(self, handler: grpc.GenericRpcHandler, services: Iterable[str]) -> None:
        """Add a handler of whole services, such as one that forwards; before `start`."""
        self._handlers.add_generic_rpc_handlers((handler,))
        self._services += services

    def forward(
        self,
        divert: Divert,
        open_forwarded: Callable[[str, Sequence[str | bytes]], Principal],
    ) -> None:
        """Let `divert` send calls to another process, and `open_forwarded` tell for whom another one calls; before `start`."""
        self._guards.divert = divert
        self._authenticator.open_forwarded = open_forwarded

    def bind(self) -> str:
        """Take the address, and the internal socket if one is configured. Calls are answered after `start`.

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
        inner, path = self._options.internal_socket, self._options.socket
        for where in (f"unix-abstract:{inner}" if inner else "", f"unix:{path}" if path else ""):
            try:
                if where:
                    self._server.add_insecure_port(
                        where
                    )  # gRPC removes a socket left behind, and its own at the end
            except RuntimeError as error:
                raise FailedPreconditionError(f"cannot listen on {where}", reason="BIND_FAILED") from error
        if path is not None:
            path.chmod(0o666)
        if self._options.health_listen:
            self._probed, probes = bind_health(self._options.health_listen, self._health)
            self._ports.append(probes)
        self._ports.append(port)
        return str(ListenAddress(address.host, port))

    async def start(self) -> None:
        """Begin to answer calls.

        Raises:
            FailedPreconditionError: the audit log cannot be written (reason AUDIT_FILE).
        """
        if self._audit is not None:
            self._audit.start()
        if self._options.reflection:
            reflection: Any = import_module("grpc_reflection.v1alpha.reflection")  # has no types
            messages: Any = import_module("grpc_reflection.v1alpha.reflection_pb2")
            default = descriptor_pool.Default()
            found = {name: getattr(default, name) for name in dir(default) if name.startswith("Find")}
            pool = SimpleNamespace(**found | {"FindFileContainingSymbol": wire.find_file})
            names = [*self._services, _health.SERVICE_NAME, reflection.SERVICE_NAME]
            handler = grpc.stream_stream_rpc_method_handler(
                reflection.aio.ReflectionServicer(names, pool).ServerReflectionInfo,
                messages.ServerReflectionRequest.FromString,
                messages.ServerReflectionResponse.SerializeToString,
            )
            for version in ("v1", "v1alpha"):  # their messages are the same on the wire
                name = f"grpc.reflection.{version}.ServerReflection"
                served = grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler})
                self._handlers.add_generic_rpc_handlers((served,))
        await self.report(serving=self._serving)
        await self._server.start()
        if self._probed is not None:
            await self._probed.start()
        watches = {"watch connections": self._connections.watch(*self._ports)}
        if self._meter is not None:
            watches["watch the event loop"] = self._meter.watch_loop()
        self._watches = [asyncio.create_task(watch, name=name) for name, watch in watches.items()]

    async def report(self, *, serving: bool) -> None:
        """Set what health checks answer for the services: SERVING by default. May be called before `start`.

        The server itself is SERVING until it stops.
        """
        self._serving = serving
        status = _health_pb2.HealthCheckResponse
        for service in self._services:
            await self._health.set(service, status.SERVING if serving else status.NOT_SERVING)

    def end_calls(self, error: GpuscaleError) -> None:
        """End every open call except health checks with an error."""
        self._calls.end((*self._calls.streams, *self._calls.unary), error)

    async def stop(self, grace: float = 5.0) -> None:
        """Warn health watchers, refuse new calls, end streams, and let unary calls finish for `grace` seconds.

        Calls that are refused, or have to end before their time, are answered UNAVAILABLE, reason SHUTTING_DOWN: repeating
        them elsewhere is safe where they may be repeated at all. The connections are closed last: gRPC core answers what
        arrives while it closes with CANCELLED. Takes at most `grace` + 4.1 s, and usually no longer than the calls.
        """
        with suppress(TimeoutError):  # a watcher that does not read may keep the health service waiting
            async with asyncio.timeout(HARD_STOP):
                await self._health.enter_graceful_shutdown()
        calls, error = self._calls, self._calls.stop()
        calls.end(calls.streams, error)
        if calls.unary:
            await asyncio.wait(calls.unary, timeout=grace)
        calls.end(calls.unary, error)
        if calls.public:
            await asyncio.wait(calls.public, timeout=HEALTH_NOTICE)
        calls.end(calls.public, error)
        await self._server.stop(HARD_STOP)
        if self._probed is not None:
            await self._probed.stop(None)
        for watch in self._watches:
            watch.cancel()
        if self._watches:
            await asyncio.wait(self._watches)
        if self._audit is not None:
            await asyncio.to_thread(self._audit.close)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
