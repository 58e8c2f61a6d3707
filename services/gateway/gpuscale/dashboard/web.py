"""The web server: NiceGUI on uvicorn, on the loop of the program."""

import secrets
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI
from fastapi.middleware.gzip import GZipMiddleware
from fastapi.middleware.trustedhost import TrustedHostMiddleware
from nicegui import ui
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpuscale.dashboard.frame import Site
from gpuscale.dashboard.pages import (
    endpoint,
    endpoints,
    fleet,
    gpu,
    health,
    recording,
    recordings,
    reservations,
    timeline,
)
from gpuscale.dashboard.signing_in import Visitors, add_door

KEPT_MESSAGES = 10
"""Messages to each browser that are kept in case its connection breaks; beyond them it loads the page again."""
COMPRESSION = 3
"""The first visit of a browser is scripts above all: higher levels take the server more time than they save on the way."""


def application(site: Site, visitors: Visitors | None, *, names: Sequence[str], compress: bool) -> FastAPI:
    """The pages, as an application; behind a door where there are `visitors` to let in.

    Where there are `names` a browser is answered only if it asks for this host by one of them: a page from elsewhere whose
    name was made to lead here would else read everything, without anybody signing in ("DNS rebinding").

    Without `compress` a first visit costs the server a third, and more bytes: what a browser on the same host wants.
    """

    def gpu_page(node: str, uuid: str) -> None:
        gpu.build(site, node, uuid)

    def endpoint_page(name: str) -> None:
        endpoint.build(site, name)

    def recording_page(name: str) -> None:
        recording.build(site, name)

    ui.page("/")(lambda: fleet.build(site))
    ui.page("/gpus/{node}/{uuid}")(gpu_page)
    ui.page("/time")(lambda: timeline.build(site))
    ui.page("/reservations")(lambda: reservations.build(site))
    ui.page("/endpoints")(lambda: endpoints.build(site))
    ui.page("/endpoints/{name}")(endpoint_page)
    ui.page("/recordings")(lambda: recordings.build(site))
    ui.page("/recordings/{name}")(recording_page)
    ui.page("/health")(lambda: health.build(site))
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    if visitors is not None:
        add_door(app, visitors)
    app.add_middleware(Unframed)
    if names:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=names, www_redirect=False)
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
        gzip_middleware_factory=_compressed if compress else None,
    )
    return app


class Unframed:
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


def _compressed(inner: ASGIApp) -> GZipMiddleware:
    return GZipMiddleware(inner, compresslevel=COMPRESSION)


class WebServer(uvicorn.Server):
    """Serves until `should_exit` is set; signals are the program's business, not its own."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave the signals alone."""
        yield
