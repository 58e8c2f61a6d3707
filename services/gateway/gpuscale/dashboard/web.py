"""The web server: NiceGUI on uvicorn, with its socket, the client of the gateway, and the feed, on the program's loop."""

import asyncio
import ipaddress
import logging
import secrets
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Generator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI, Request
from fastapi.middleware.gzip import GZipMiddleware
from nicegui import Client, binding, ui
from nicegui import app as pages
from starlette.datastructures import Headers
from starlette.responses import ContentStream, PlainTextResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from gpuscale.api.allocator.v1 import ListBookingsRequest
from gpuscale.client import ClientTls, GpuscaleError, connect_async, read_token
from gpuscale.common.errors import FailedPreconditionError, InvalidArgumentError
from gpuscale.common.rpc.limits import Connections
from gpuscale.common.rpc.meter import ProgramMeter
from gpuscale.common.rpc.server import ListenAddress, bind_error, check_exposure, parse_listen
from gpuscale.common.runtime.tasks import SystemClock, TaskScope
from gpuscale.common.security.tls import server_context
from gpuscale.dashboard.facts import Facts
from gpuscale.dashboard.feed import Feed
from gpuscale.dashboard.figures import Figures, counted_requests
from gpuscale.dashboard.frame import DashboardSite, page
from gpuscale.dashboard.pages import endpoints, reservations
from gpuscale.dashboard.pages.audit import audit_page
from gpuscale.dashboard.pages.fleet import fleet_page, gpu_page, health_page, timeline_page
from gpuscale.dashboard.pages.policies import policies_page
from gpuscale.dashboard.pages.recordings import recording_page, recordings_page
from gpuscale.dashboard.pages.usage import usage_page
from gpuscale.dashboard.settings import DashboardSettings
from gpuscale.dashboard.visitors import CALENDAR, VisitorActions, Visitors, require_sign_in

KEPT_MESSAGES = 10
"""Messages kept for each browser in case its connection breaks; after more, it reloads the page."""
RECONNECT_SECONDS = 15
"""How long a page outlives its connection. A busy browser may take two fifths of it to answer a ping."""
COMPRESSION = 3
"""A first visit is mostly scripts; higher levels cost the server more time than they save in transfer."""
STOP_SECONDS = 2
"""Seconds for requests to finish at shutdown; browsers never close their sockets."""


@asynccontextmanager
async def open_dashboard(
    settings: DashboardSettings, meter: ProgramMeter | None = None
) -> AsyncGenerator[str]:
    """Serve the dashboard until the end of the block; yields its URL. `meter` shows its metrics on `/metrics`.

    Raises:
        FailedPreconditionError: ADDRESS_IN_USE; BIND_FAILED; INSECURE_BIND: other hosts could connect without sign-in;
            TLS_FILES or TOKEN_FILE: a file cannot be used.
        InvalidArgumentError: invalid address to listen on.
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
    # Host names to answer to, beside addresses; a sign-in cookie is bound to one name anyway.
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
    # The certificate is reloaded when its files change.
    context = None if server_tls is None else server_context(server_tls)
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        bound = bound or socket.create_server((address.host, address.port), family=family)
    except OSError as error:
        raise bind_error(address) from error
    with bound:
        facts = Facts()
        async with connect(token=token) as client, TaskScope() as scope, AsyncExitStack() as stack:
            feed = Feed(client, facts)
            await stack.enter_async_context(feed.running())
            figures = Figures(feed.errors)
            if meter is not None:
                stack.enter_context(meter.showing(figures.add))
            actions = visitors.actions if visitors else lambda: None
            secret = (
                partial(reservations.calendar_secret, settings.calendar_file)
                if settings.calendar_file
                else str
            )
            site = DashboardSite(facts, client, settings.gateway_address, actions, feed.look, secret)
            connections = Connections()
            app = application(site, visitors, names=names, compress=not address.loopback)
            config = uvicorn.Config(
                counted_requests(tracked_connections(app, connections), figures, ROUTES),
                log_config=None,
                log_level="warning",
                access_log=False,
                headers=[("content-security-policy", "frame-ancestors 'none'")],  # no clickjacking
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


PAGES: Mapping[str, Callable[..., None]] = {
    "/": fleet_page,
    "/gpus/{node}/{uuid}": gpu_page,
    "/time": timeline_page,
    "/reservations": reservations.reservations_page,
    "/reservations/{reservation}": reservations.reservation_page,
    "/usage": usage_page,
    "/bookings": reservations.bookings_page,
    "/policies": policies_page,
    "/endpoints": endpoints.endpoints_page,
    "/endpoints/{endpoint}": endpoints.endpoint_page,
    "/endpoints/{endpoint}/decisions/{decision}": endpoints.decision_page,
    "/endpoints/{endpoint}/replicas/{replica}": endpoints.replica_page,
    "/recordings": recordings_page,
    "/recordings/{recording}": recording_page,
    "/health": health_page,
    "/audit": audit_page,
}
"""The builder of each page."""
ROUTES = frozenset(path.split("/")[1] for path in (*PAGES, CALENDAR, "/sign-in", "/sign-out", "/_nicegui"))
"""First parts of the paths that are counted one by one."""


def passed_socket(listen: str) -> socket.socket | None:
    """The inherited socket `fd:N`; None for an address. Raises InvalidArgumentError: it is not a listening socket."""
    if not listen.startswith("fd:"):
        return None
    with suppress(OSError, ValueError):
        passed = socket.socket(fileno=int(listen.removeprefix("fd:")))
        if passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return passed
    raise InvalidArgumentError(f"listen: {listen} is not a listening socket", field="listen")


def application(
    site: DashboardSite, visitors: Visitors | None, *, names: Collection[str] | None, compress: bool
) -> FastAPI:
    """The web application; requires sign-in if `visitors` are given.

    With `names`, requests must address this host by one of them or by IP address. Otherwise a foreign page could read everything by
    pointing its own name here (DNS rebinding). Requests of another origin are always refused.

    Without `compress`, a first visit costs the server a third of the time but more bytes, which suits browsers on this host.
    """

    async def calendar(secret: str) -> Response:
        known = site.calendar()
        if not known or not secrets.compare_digest(known.encode(), secret.encode()):
            return PlainTextResponse("no such calendar", status_code=404)
        request = ListBookingsRequest(order_by="start_time desc", page_size=1000, show_ended=True)
        try:
            found = await site.client.bookings.ListBookings(request)
        except GpuscaleError as error:
            return PlainTextResponse(f"cannot read the bookings: {error.message}", status_code=503)
        return Response(reservations.ical(found.bookings), media_type="text/calendar")

    for path, make in PAGES.items():
        ui.page(path)(partial(make, site))

    async def no_page(request: Request, _: Exception) -> Response:
        """Answer without the log line that NiceGUI would write: anyone could fill the log."""
        told = f"no page {request.url.path}"
        if "text/html" not in request.headers.get("accept", ""):
            return PlainTextResponse(told, status_code=404)
        with Client(ui.page(""), request=request) as client, page(site, "No such page"):
            ui.label(told)
        return client.build_response(request, 404)

    pages.add_exception_handler(404, no_page)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.get(CALENDAR + "{secret}.ics")(calendar)
    if visitors is not None:
        serve_logs(app, visitors)
        require_sign_in(app, visitors)
    app.add_middleware(same_origin, names=names)
    binding.MAX_PROPAGATION_TIME = float("inf")  # nothing is bound: a warning would tell of a busy host
    # NiceGUI leaves the type of an argument that is not given here open.
    ui.run_with(  # pyright: ignore[reportUnknownMemberType]
        app,
        title="gpuscale",
        dark=None,
        language="en-US",
        storage_secret=secrets.token_hex(),
        show_welcome_message=False,
        tailwind=False,
        binding_refresh_interval=None,
        message_history_length=KEPT_MESSAGES,
        reconnect_timeout=RECONNECT_SECONDS,
        gzip_middleware_factory=partial(GZipMiddleware, compresslevel=COMPRESSION) if compress else None,
    )
    return app


def serve_logs(app: FastAPI, visitors: Visitors) -> None:
    """Serve the full logs of jobs and replicas as text, to signed-in visitors."""

    async def text(request: Request, read: Callable[[VisitorActions], Awaitable[ContentStream]]) -> Response:
        actions = visitors.actions(request.headers)
        if actions is None:
            return PlainTextResponse("signed out: sign in again", status_code=403)
        try:
            parts = await read(actions)
        except GpuscaleError as error:
            return PlainTextResponse(error.message, status_code=404)
        return StreamingResponse(
            parts, media_type="text/plain", headers={"x-content-type-options": "nosniff"}
        )

    async def output(request: Request, reservation: str) -> Response:
        return await text(request, lambda actions: reservations.all_output(actions, reservation))

    async def log(request: Request, endpoint: str, replica: str) -> Response:
        name = f"endpoints/{endpoint}/replicas/{replica}"
        return await text(request, lambda actions: endpoints.whole_log(actions, name))

    app.get("/reservations/{reservation}/output")(output)
    app.get("/endpoints/{endpoint}/replicas/{replica}/log")(log)


def same_origin(app: ASGIApp, names: Collection[str] | None) -> ASGIApp:
    """Refuse requests to unknown host names and from pages of other origins.

    Browsers send `Origin` with POST requests and with every web socket, Socket.IO's too.
    """

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        problem = ""
        if scope["type"] in {"http", "websocket"}:
            headers = Headers(scope=scope)
            host, origin = headers.get("host", ""), headers.get("origin")
            if names is not None and not _is_own(host, names):
                problem = "unknown host name: gpuscale-dashboard --allowed-hosts lists the names to answer to"
            elif origin is not None and urlsplit(origin).netloc.lower() != host.lower():
                problem = "requests from pages of another origin are refused"
        if not problem:
            await app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": problem})
        else:
            await PlainTextResponse(problem, status_code=403)(scope, receive, send)

    return serve


def _is_own(host: str, names: Collection[str]) -> bool:
    """Whether a `Host` header holds one of the names or an IP address, which DNS cannot redirect."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name in names or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def tracked_connections(app: ASGIApp, connections: Connections) -> ASGIApp:
    """Keep connections open while a request is being answered; those without a complete request are cut."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        client = scope.get("client")
        if client is None:
            await app(scope, receive, send)
            return
        peer = f"{client[0]}:{client[1]}"
        connections.begin(peer)
        try:
            await app(scope, receive, send)
        finally:
            connections.end(peer)

    return serve


class WebServer(uvicorn.Server):
    """Serves until `should_exit` is set; the program handles signals."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave the signals alone."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop; requests that take too long are cut short, which uvicorn logs as errors."""

        def is_news(record: logging.LogRecord) -> bool:
            kind = (record.exc_info or (None,))[0]
            late = "graceful shutdown exceeded" in record.getMessage()
            return kind is not asyncio.CancelledError and not late

        logging.getLogger("uvicorn.error").addFilter(is_news)
        await super().shutdown(sockets)
