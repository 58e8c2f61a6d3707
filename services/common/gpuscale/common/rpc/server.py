"""The gRPC server of every program: services on one address, with health checks, TLS, limits and graceful shutdown.

Also listen addresses, the standard health service (grpc.health.v1), and the registration of services.
"""

import asyncio
import errno
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Self, cast

import grpc

from gpuscale.common.errors import FailedPreconditionError, GpuscaleError, InvalidArgumentError
from gpuscale.common.rpc import channel
from gpuscale.common.rpc.audit import AuditLog, AuditOptions
from gpuscale.common.rpc.interceptor import Divert, Guards, GuardSettings, Handler, OpenCalls
from gpuscale.common.rpc.limits import Connections, RateLimits
from gpuscale.common.rpc.meter import CallMeter, CallWatcher
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.security.auth import Authenticator, Principal
from gpuscale.common.security.tls import ServerTls, server_credentials

# grpcio-health-checking has no types.
_health: Final[Any] = import_module("grpc_health.v1.health")
_health_pb2: Final[Any] = import_module("grpc_health.v1.health_pb2")
_health_grpc: Final[Any] = import_module("grpc_health.v1.health_pb2_grpc")

SERVER_ARGUMENTS: Final[channel.ChannelArguments] = (
    ("grpc.so_reuseport", 0),  # a second server on the port must fail, not share it
    # Core's default drops calls at random above about 1,000 pending; thousands of agents may reconnect at once.
    ("grpc.server.max_pending_requests", 20_000),
    ("grpc.server.max_pending_requests_hard_limit", 40_000),
    # Core would cancel calls not taken within 30 s by a busy loop; the caller's deadline should limit the wait.
    ("grpc.server_max_unrequested_time_in_server", 86_400),
    ("grpc.max_concurrent_streams", channel.MAX_STREAMS_PER_CONNECTION),
    *channel.COMMON_ARGUMENTS,
    # Followers of a leader ping every second; with core's default (5 min) their connections would be closed for too many pings.
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.keepalive_permit_without_calls", 1),
    # Core would ping each agent each second to measure bandwidth, which small messages do not need.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.max_connection_age_ms", 3_600_000),  # so that renewed certificates take effect
    ("grpc.max_connection_age_grace_ms", 60_000),
)

HEALTH_NOTICE: Final = 0.1
"""Seconds for health watchers to read NOT_SERVING before their streams end."""
HARD_STOP: Final = 2.0
"""Seconds for cancelled calls to end before their connections are cut."""

_MAX_PORT = 65_535
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """A host and port; `host` is without brackets."""

    host: str
    port: int

    @property
    def loopback(self) -> bool:
        """Whether only this host can reach it. Names other than localhost may resolve to anything."""
        return channel.is_local(str(self))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_listen(listen: str, field: str = "listen") -> ListenAddress:
    """Parse HOST:PORT or [IPV6]:PORT of the setting `field`; InvalidArgumentError for anything else."""
    host, colon, port = listen.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    valid_port = port.isascii() and port.isdigit() and int(port) <= _MAX_PORT
    if not (colon and host and valid_port) or (":" in host) != bracketed:
        raise InvalidArgumentError(f"{listen!r} is not an address to listen on; write HOST:PORT", field=field)
    return ListenAddress(host, int(port))


def check_exposure(address: ListenAddress, *, tls: bool, insecure_allow_remote: bool) -> None:
    """Raise FailedPreconditionError (INSECURE_BIND) for plain text to other hosts, unless the settings allow it."""
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
    """The error of a failed bind. gRPC does not tell, so this binds once more."""
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
    """A service and its `add` function, such as `partial(add_FleetServiceServicer_to_server, servicer)`."""

    service: str
    add: Callable[[grpc.aio.Server], None]


def registrations(*servicers: object) -> Iterator[Registration]:
    """The registrations of servicers, by the generated classes that they extend."""
    for servicer in servicers:
        for base in type(servicer).__mro__:
            package, _, module = base.__module__.rpartition(".")
            if module.endswith("_pb2_grpc") and base.__name__.endswith("Servicer"):
                add = getattr(import_module(base.__module__), f"add_{base.__name__}_to_server")
                service = f"{package}.{base.__name__.removesuffix('Servicer')}"
                yield Registration(service, partial(add, servicer))


class HandlerCollector:
    """Stands in for a server when services are added: stores their handlers by path, and passes them on as generic ones.

    Generated code also registers each method with gRPC core, and a grpc.aio server then waits for a call per method: with
    forty methods this costs a fifth of its throughput (measured with grpcio 1.85.1). Without `guards` they are only stored.
    """

    def __init__(self, guards: Guards | None = None) -> None:
        self.handlers: dict[str, Handler] = {}
        self._guards = guards

    def add(self, registration: Registration) -> None:
        """Add a service. Generated code calls only the two methods below."""
        registration.add(cast("grpc.aio.Server", self))

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Pass on the handlers of a service."""
        if self._guards is not None:
            self._guards.add(generic_rpc_handlers)

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: Mapping[str, Handler]
    ) -> None:
        """Store the handlers of a service."""
        for name, handler in method_handlers.items():
            self.handlers[f"/{service_name}/{name}"] = handler


@dataclass(frozen=True)
class ServerOptions:
    """Options of a server."""

    listen: str = "127.0.0.1:0"  # HOST:PORT; port 0 takes a free one. Other hosts need TLS
    tls: ServerTls | None = None  # certificate files; None for plain text
    insecure_allow_remote: bool = False  # allow plain text to other hosts
    # name of another, abstract, unix socket for holders of the authenticator's `internal_token`. Unlike a path,
    # nobody else can take the name while the server listens (docs/adr/0020)
    internal_socket: str = ""
    socket: Path | None = None  # another unix socket for all local processes, with role `socket_role`
    reflection: bool = False  # serve reflection
    max_concurrent_unary: int = 512  # open unary calls; more are answered RESOURCE_EXHAUSTED
    default_deadline: float = 30.0  # seconds for unary calls without a deadline
    calls_per_second: float = 0.0  # sustained rate of each caller; 0 for no limit
    audit: AuditOptions | None = None  # log of changes and refusals
    health_listen: str = ""  # HOST:PORT of plain-text health checks; empty for none


def bind_health(listen: str, servicer: Any = None) -> tuple[grpc.aio.Server, int]:
    """A server for Health.Check only, for probes without TLS such as a kubelet's, and its port.

    The caller starts it and watches its connections. It serves no Watch, so callers cannot keep calls open. Without a
    `servicer` it answers SERVING.

    Raises:
        FailedPreconditionError: ADDRESS_IN_USE or BIND_FAILED.
        InvalidArgumentError: the address is malformed.
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
    """Serves the added services from `start` to `stop`; also an async context manager."""

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
        self._watch: asyncio.Task[None] | None = None
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
            from gpuscale.common.rpc.audit_servicer import AuditServicer  # 0.4 MB with its filters

            self.add(*registrations(AuditServicer(options.audit)))

    def add(self, *registrations: Registration) -> None:
        """Add services, before `start`."""
        for registration in registrations:
            self._handlers.add(registration)
            self._services.append(registration.service)

    def add_generic(self, handler: grpc.GenericRpcHandler, services: Iterable[str]) -> None:
        """Add a handler of services, such as a forwarder, before `start`."""
        self._handlers.add_generic_rpc_handlers((handler,))
        self._services += services

    def forward(
        self, divert: Divert, open_forwarded: Callable[[str, Sequence[str | bytes]], Principal]
    ) -> None:
        """Set, before `start`, how calls are diverted to another process, and how callers of forwarded ones are read."""
        self._guards.divert = divert
        self._authenticator.open_forwarded = open_forwarded

    def bind(self) -> str:
        """Bind the address and sockets; calls are answered after `start`. Returns the address with its port.

        Raises:
            FailedPreconditionError: ADDRESS_IN_USE, BIND_FAILED, INSECURE_BIND (TLS is needed) or TLS_FILES.
            InvalidArgumentError: the address is malformed.
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
                if where:  # gRPC removes a stale socket file, and its own at the end
                    self._server.add_insecure_port(where)
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
        """Start to answer calls. Raises FailedPreconditionError if the audit log cannot be written (AUDIT_FILE)."""
        if self._audit is not None:
            self._audit.start()
        if self._options.reflection:
            reflection: Any = import_module("grpc_reflection.v1alpha.reflection")  # has no types
            messages: Any = import_module("grpc_reflection.v1alpha.reflection_pb2")
            ours = (
                one for one in self._services if one.startswith("gpuscale.")
            )  # KEDA's has other names here
            names = [*ours, _health.SERVICE_NAME, reflection.SERVICE_NAME]
            handler = grpc.stream_stream_rpc_method_handler(
                reflection.aio.ReflectionServicer(names).ServerReflectionInfo,
                messages.ServerReflectionRequest.FromString,
                messages.ServerReflectionResponse.SerializeToString,
            )
            for version in ("v1", "v1alpha"):  # same messages on the wire
                name = f"grpc.reflection.{version}.ServerReflection"
                served = grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler})
                self._handlers.add_generic_rpc_handlers((served,))
        await self.report(serving=self._serving)
        await self._server.start()
        if self._probed is not None:
            await self._probed.start()
        self._watch = asyncio.create_task(self._connections.watch(*self._ports), name="watch connections")

    async def report(self, *, serving: bool) -> None:
        """Set the health of the services, SERVING by default; may be called before `start`.

        The server itself is SERVING until it stops.
        """
        self._serving = serving
        status = _health_pb2.HealthCheckResponse
        for service in self._services:
            await self._health.set(service, status.SERVING if serving else status.NOT_SERVING)

    def end_calls(self, error: GpuscaleError) -> None:
        """End all open calls except of public methods with an error."""
        self._calls.end((*self._calls.streams, *self._calls.unary), error)

    async def stop(self, grace: float = 5.0) -> None:
        """Warn health watchers, reject new calls, end streams, and let unary calls finish for `grace` seconds.

        Rejected and interrupted calls get UNAVAILABLE, reason SHUTTING_DOWN, and may be retried elsewhere if they may be
        retried at all. Connections are closed last, as gRPC core answers calls that arrive meanwhile with CANCELLED. Takes at
        most `grace` + 4.1 s, usually as long as the calls.
        """
        with suppress(TimeoutError):  # a watcher that does not read may block it
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
