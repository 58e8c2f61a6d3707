"""The web server: NiceGUI on uvicorn, on the loop of the program."""

import secrets
from collections.abc import Generator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI
from nicegui import ui

from gpuscale.dashboard.frame import Site
from gpuscale.dashboard.pages import endpoint, endpoints, fleet, gpu, health, recordings, reservations
from gpuscale.dashboard.signing_in import Visitors, add_door


def application(site: Site, visitors: Visitors | None) -> FastAPI:
    """The pages, as an application; behind a door where there are `visitors` to let in."""

    def gpu_page(node: str, uuid: str) -> None:
        gpu.build(site, node, uuid)

    def endpoint_page(name: str) -> None:
        endpoint.build(site, name)

    def recording_page(name: str) -> None:
        recordings.build_one(site, name)

    ui.page("/")(lambda: fleet.build(site))
    ui.page("/gpus/{node}/{uuid}")(gpu_page)
    ui.page("/reservations")(lambda: reservations.build(site))
    ui.page("/endpoints")(lambda: endpoints.build(site))
    ui.page("/endpoints/{name}")(endpoint_page)
    ui.page("/recordings")(lambda: recordings.build(site))
    ui.page("/recordings/{name}")(recording_page)
    ui.page("/health")(lambda: health.build(site))
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    if visitors is not None:
        add_door(app, visitors)
    # NiceGUI leaves the type of an argument that is not given here open.
    ui.run_with(  # pyright: ignore[reportUnknownMemberType]
        app, title="gpuscale", dark=None, storage_secret=secrets.token_hex(), show_welcome_message=False
    )
    return app


class WebServer(uvicorn.Server):
    """Serves until `should_exit` is set; signals are the program's business, not its own."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave the signals alone."""
        yield
