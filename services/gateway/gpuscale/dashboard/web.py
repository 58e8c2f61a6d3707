"""The web server: NiceGUI on uvicorn, on the loop of the program."""

import ipaddress
import secrets
from collections.abc import Collection, Generator
from contextlib import contextmanager
from functools import partial
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI, Request
from fastapi.middleware.gzip import GZipMiddleware
from nicegui import app as pages
from nicegui import ui
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpuscale.common.rpc.calls import Connections
from gpuscale.dashboard.frame import DashboardSite
from gpuscale.dashboard.pages.endpoints import endpoint_page, endpoints_page
from gpuscale.dashboard.pages.fleet import fleet_page, gpu_page, health_page, timeline_page
from gpuscale.dashboard.pages.recordings import recording_page, recordings_page
from gpuscale.dashboard.pages.reservations import reservations_page
from gpuscale.dashboard.visitors import Visitors, require_sign_in

KEPT_MESSAGES = 10
"""Messages to each browser that are kept in case its connection breaks; beyond them it loads the page again."""
COMPRESSION = 3
"""The first visit of a browser is scripts above all: higher levels take the server more time than they save on the way."""


def application(
    site: DashboardSite, visitors: Visitors | None, *, names: Collection[str] | None, compress: bool
) -> FastAPI:
    """The pages, as an application; behind a door where there are `visitors` to let in.

    Where there are `names` a browser is answered only if it asks for this host by one of them, or by an address: a page from
    elsewhere whose name was made to lead here would else read everything, without anybody signing in ("DNS rebinding").
    What a page of another origin asks for is refused in any case.

    Without `compress` a first visit costs the server a third, and more bytes: what a browser on the same host wants.
    """

    def gpu(node: str, uuid: str) -> None:
        gpu_page(site, node, uuid)

    def endpoint(name: str) -> None:
        endpoint_page(site, name)

    def recording(name: str) -> None:
        recording_page(site, name)

    ui.page("/")(lambda: fleet_page(site))
    ui.page("/gpus/{node}/{uuid}")(gpu)
    ui.page("/time")(lambda: timeline_page(site))
    ui.page("/reservations")(lambda: reservations_page(site))
    ui.page("/endpoints")(lambda: endpoints_page(site))
    ui.page("/endpoints/{name}")(endpoint)
    ui.page("/recordings")(lambda: recordings_page(site))
    ui.page("/recordings/{name}")(recording)
    ui.page("/health")(lambda: health_page(site))
    pages.add_exception_handler(404, _no_page)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    if visitors is not None:
        require_sign_in(app, visitors)
    app.add_middleware(NoFraming)
    app.add_middleware(SameOrigin, names=names)
    # NiceGUI leaves the type of an argument that is not given here open.
    ui.run_with(  # pyright: ignore[reportUnknownMemberType]
        app,
        title="gpuscale",
        dark=None,
        storage_secret=secrets.token_hex(),
        show_welcome_message=False,
        tailwind=False,
        binding_refresh_interval=None,
        message_history_length=KEPT_MESSAGES,
        gzip_middleware_factory=partial(GZipMiddleware, compresslevel=COMPRESSION) if compress else None,
    )
    return app


class SameOrigin:
    """Answers browsers that call this host by a name of its own, for pages that came from here.

    Browsers send `Origin` with what a page posts and with every socket that it opens, Socket.IO's too.
    """

    def __init__(self, app: ASGIApp, names: Collection[str] | None) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or one socket."""
        problem = ""
        if scope["type"] in {"http", "websocket"}:
            headers = Headers(scope=scope)
            host, origin = headers.get("host", ""), headers.get("origin")
            if self._names is not None and not _is_own(host, self._names):
                problem = "unknown host name: gpuscale-dashboard --allowed-hosts lists the names to answer to"
            elif origin is not None and urlsplit(origin).netloc.lower() != host.lower():
                problem = "requests from pages of another origin are refused"
        if not problem:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": problem})
        else:
            await PlainTextResponse(problem, status_code=403)(scope, receive, send)


def _is_own(host: str, names: Collection[str]) -> bool:
    """Whether a `Host` is one of the names, or an address: no name can be made to lead to another address then."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name in names or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


class NoFraming:
    """Tells browsers that no other page may show this one in a frame, where it could be clicked on unseen."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or one socket."""

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    (b"content-security-policy", b"frame-ancestors 'none'"),
                ]
            await send(message)

        await self._app(scope, receive, told)


class TrackedConnections:
    """Lets connections last while a request of theirs is answered; those that send none in full are cut."""

    def __init__(self, app: ASGIApp, connections: Connections) -> None:
        self._app = app
        self._connections = connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, or one socket."""
        client = scope.get("client")
        if client is None:
            await self._app(scope, receive, send)
            return
        peer = f"{client[0]}:{client[1]}"
        self._connections.begin(peer)
        try:
            await self._app(scope, receive, send)
        finally:
            self._connections.end(peer)


async def _no_page(request: Request, _: Exception) -> Response:
    """What somebody mistyped is no line in the log, as NiceGUI has it: whoever asks could fill the log."""
    return PlainTextResponse(f"there is no page {request.url.path}", status_code=404)


class WebServer(uvicorn.Server):
    """Serves until `should_exit` is set; signals are the program's business, not its own."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave the signals alone."""
        yield
