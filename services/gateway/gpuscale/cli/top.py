"""`gpuscalectl top`: everything on one screen, again and again or once."""

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from gpuscale.cli.options import duration
from gpuscale.cli.output import to_dict, write_lines
from gpuscale.cli.session import Session, session_of

if TYPE_CHECKING:
    from gpuscale.client import Client

_CLEAR = "\x1b[H\x1b[2J"


def top(
    context: typer.Context,
    once: Annotated[
        bool, typer.Option("--once", help="Print one screen and end; so it is without a terminal.")
    ] = False,
    interval: Annotated[
        float, typer.Option(parser=duration, metavar="DURATION", help="Time between two screens.")
    ] = 2.0,
) -> None:
    """Nodes, GPUs with bars, reservations and endpoints on one screen; Ctrl-C ends it."""
    session = session_of(context)
    live = not once and session.output.human and sys.stdout.isatty()
    with session.connect() as client:
        _show(session, client, clear=live)
        while live:
            time.sleep(interval)
            _show(session, client, clear=True)


def _show(session: Session, client: "Client", *, clear: bool) -> None:
    from gpuscale.cli import resources
    from gpuscale.cli.views.top import screen

    nodes = resources.nodes(client)
    reservations = resources.reservations(client)
    endpoints = resources.endpoints(client)
    if not session.output.human:
        listed = (("nodes", nodes), ("reservations", reservations), ("endpoints", endpoints))
        session.output.write_data({key: [to_dict(item) for item in items] for key, items in listed})
        return
    lines = screen(session.output, nodes, reservations, endpoints, resources.holders(reservations))
    if clear:
        sys.stdout.write(_CLEAR)
    write_lines(lines)
    sys.stdout.flush()
