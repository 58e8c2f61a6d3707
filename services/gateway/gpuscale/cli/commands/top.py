"""`gpuscalectl top`: everything on one screen, live on a terminal, or once."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from gpuscale.cli.console.output import to_dict, write_lines
from gpuscale.cli.console.session import NOBODY, Session, session_of
from gpuscale.cli.console.terminal import TERMINAL
from gpuscale.common.errors import GpuscaleError, UnavailableError

if TYPE_CHECKING:
    from gpuscale.client import Client


def top(
    context: typer.Context,
    once: Annotated[
        bool, typer.Option("--once", help="Print one screen and end; so it is without a terminal.")
    ] = False,
) -> None:
    """GPUs, reservations, endpoints, decisions and health on one screen; q ends it, its foot tells the other keys."""
    session = session_of(context)
    if once or not session.output.human or not sys.stdout.isatty():
        with session.connect() as client:
            _show(session, client)
        return
    try:
        from gpuscale.dashboard.terminal import Top
    except ModuleNotFoundError as error:
        message = f"the live screen is not installed ({error.name} is missing): pip install 'gpuscale[cli]', or top --once"
        raise GpuscaleError(message, reason="NOT_INSTALLED") from error
    _knock(session)
    Top(session.connect_async, ascii_only=TERMINAL.ascii).run()


def _knock(session: Session) -> None:
    """Where nothing answers, or nobody is let in, that is said in a line and not on a screen of its own.

    Raises:
        GpuscaleError: so it is; a single service that is away is not.
    """
    from gpuscale.api.monitor.v1 import ListNodesRequest

    with session.connect() as client:
        try:
            client.fleet.ListNodes(ListNodesRequest(page_size=1))
        except UnavailableError as error:
            if error.reason in NOBODY:
                raise


def _show(session: Session, client: "Client") -> None:
    from gpuscale.cli.console import resources
    from gpuscale.cli.views.top import screen
    from gpuscale.client.states import marks

    nodes = resources.nodes(client)
    reservations = resources.reservations(client)
    endpoints = resources.endpoints(client)
    if not session.output.human:
        listed = (("nodes", nodes), ("reservations", reservations), ("endpoints", endpoints))
        session.output.write_data({key: [to_dict(item) for item in items] for key, items in listed})
        return
    holders, marked = resources.holders(reservations), marks(resources.cordons(client))
    lines = screen(session.output, nodes, reservations, endpoints, holders, marked)
    write_lines(lines)
    sys.stdout.flush()
