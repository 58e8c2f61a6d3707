"""`gpuscale-dashboard`: its socket, its client of the gateway, the feed, and the web server, all on one loop."""

from gpuscale.common.runtime import core_log as core_log  # noqa: PLC0414 - first: what follows imports gRPC

# isort: split
import asyncio
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial

import uvicorn

from gpuscale.client import ClientTls, connect_async, read_token
from gpuscale.common.config.settings import run_program
from gpuscale.common.errors import FailedPreconditionError, InvalidArgumentError
from gpuscale.common.rpc.calls import Connections
from gpuscale.common.rpc.meter import ProgramMeter
from gpuscale.common.rpc.server import ListenAddress, bind_error, check_exposure, parse_listen
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import SystemClock, TaskScope
from gpuscale.common.security.tls import server_context
from gpuscale.dashboard.facts import Facts, FleetTally
from gpuscale.dashboard.feed import Feed
from gpuscale.dashboard.figures import SERVICE, CountedRequests, Figures
from gpuscale.dashboard.frame import DashboardSite
from gpuscale.dashboard.settings import DashboardSettings
from gpuscale.dashboard.visitors import Visitors
from gpuscale.dashboard.web import TrackedConnections, WebServer, application

STOP_SECONDS = 2
"""Seconds for requests to finish; browsers keep their sockets open for as long as they may."""


@asynccontextmanager
async def open_dashboard(
    settings: DashboardSettings, meter: ProgramMeter | None = None
) -> AsyncGenerator[str]:
    """The dashboard, until the end of the block; yields its URL. What it does is shown on the `/metrics` of `meter`.

    Raises:
        FailedPreconditionError: ADDRESS_IN_USE; BIND_FAILED; INSECURE_BIND where other hosts could look unasked;
            TLS_FILES or TOKEN_FILE where a file cannot be used.
        InvalidArgumentError: the address to listen on is none.
    """
    server_tls, bound = settings.browser_tls(), passed_socket(settings.listen)
    address = ListenAddress(*bound.getsockname()[:2]) if bound else parse_listen(settings.listen)
    check_exposure(address, tls=server_tls is not None, insecure_allow_remote=settings.insecure_allow_remote)
    sign_in = settings.sign_in or settings.link_file is not None
    if not (address.loopback or sign_in or settings.insecure_allow_remote):
        message = f"{address} can be reached from other hosts: set sign_in, or insecure_allow_remote"
        raise FailedPreconditionError(message, reason="INSECURE_BIND")
    tls = ClientTls(settings.ca_file, settings.cert_file, settings.key_file) if settings.ca_file else None
    connect = partial(connect_async, settings.gateway_address, tls=tls)
    token = read_token(settings.token_file) if settings.token_file is not None else None
    visitors: Visitors | None = None
    # What browsers may call this host beside its addresses; visitors who sign in do so for one name.
    names: frozenset[str] | None = frozenset(
        {"localhost", *(name.lower() for name in settings.allowed_hosts)}
    )
    if sign_in:
        names = None
        visitors = Visitors(
            lambda shown: connect(token=shown or None),
            SystemClock(),
            secure=server_tls is not None,
            link_file=settings.link_file,
        )
    # The certificate is read again when its files change.
    context = None if server_tls is None else server_context(server_tls)
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        bound = bound or socket.create_server((address.host, address.port), family=family)
    except OSError as error:
        raise bind_error(address) from error
    with bound:
        facts, tally = Facts(), FleetTally()
        async with connect(token=token) as client, TaskScope() as scope, AsyncExitStack() as stack:
            feed = Feed(client, facts, tally)
            await stack.enter_async_context(feed.running())
            figures = Figures(feed.errors)
            if meter is not None:
                stack.enter_context(meter.showing(figures.add))
            actions = visitors.actions if visitors else lambda: None
            site = DashboardSite(facts, tally, client, settings.gateway_address, actions)
            connections = Connections()
            app = application(site, visitors, names=names, compress=not address.loopback)
            config = uvicorn.Config(
                CountedRequests(TrackedConnections(app, connections), figures),
                log_config=None,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=STOP_SECONDS,
                ssl_context_factory=None if context is None else lambda _config, _default: context,
            )
            server = WebServer(config)
            if visitors is not None:
                scope.start("tokens of visitors", visitors.recheck())
            scope.spawn("watch connections", connections.watch(bound.getsockname()[1]))
            serving = scope.start("web server", server.serve(sockets=[bound]))
            try:
                yield f"http{'s' if context else ''}://{ListenAddress(address.host, bound.getsockname()[1])}/"
            finally:
                server.should_exit = True
                await serving


def passed_socket(listen: str) -> socket.socket | None:
    """The socket of `fd:N`; None for an address.

    Raises:
        InvalidArgumentError: there is no listening socket of that number.
    """
    if not listen.startswith("fd:"):
        return None
    with suppress(OSError, ValueError):
        passed = socket.socket(fileno=int(listen.removeprefix("fd:")))
        if passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return passed
    raise InvalidArgumentError(f"listen: {listen} is no listening socket", field="listen")


PROGRAM = "gpuscale-dashboard"
DESCRIPTION = "Shows the fleet, reservations, endpoints, recordings and health in a browser."

_log = get_logger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit code."""
    return run_program(DashboardSettings, serve, argv, program=PROGRAM, description=DESCRIPTION)


async def serve(settings: DashboardSettings, stop: asyncio.Event) -> None:
    """Serve until `stop` is set.

    Raises:
        GpuscaleError: the address, a file of TLS or the token cannot be used.
    """
    meter = ProgramMeter(SERVICE)
    async with open_dashboard(settings, meter) as url, settings.observed(meter):
        _log.info("serving", url=url, gateway=settings.gateway_address)
        if settings.listen.startswith("fd:"):  # of a parent, who lives as long as this end of the pipe waits
            asyncio.get_running_loop().add_reader(sys.stdin.fileno(), stop.set)
        await stop.wait()


if __name__ == "__main__":
    sys.exit(main())
