"""`gpuscalectl top`: everything on one screen, live on a terminal, or once."""

import sys
from typing import TYPE_CHECKING

from gpuscale.cli.console.command import command
from gpuscale.cli.console.output import to_dict
from gpuscale.cli.console.session import NOBODY, Session
from gpuscale.cli.console.terminal import TERMINAL, write_lines
from gpuscale.cli.grammar.parameters import option
from gpuscale.common.errors import GpuscaleError, UnavailableError

if TYPE_CHECKING:
    from gpuscale.client import Client


@command("top --once")
@option("--once", is_flag=True, help="Print one screen and exit, as without a terminal.")
def top(session: Session, once: bool) -> None:
    """GPUs, reservations, endpoints, decisions and health on one screen; q quits, the last line shows the other keys."""
    if once or not session.output.human or not sys.stdout.isatty():
        with session.connect() as client:
            _show(session, client)
        return
    from gpuscale.api.monitor.v1 import ListNodesRequest

    try:
        from gpuscale.dashboard.terminal import Top
    except ModuleNotFoundError as error:
        message = f"the live screen is not installed ({error.name} is missing): pip install 'gpuscale[cli]', or use top --once"
        raise GpuscaleError(message, reason="NOT_INSTALLED") from error
    with session.connect() as client:  # fail here in a line, not on a screen of its own
        try:
            client.fleet.ListNodes(ListNodesRequest(page_size=1))
        except UnavailableError as error:
            if error.reason in NOBODY:
                raise
    Top(session.connect_async, ascii_only=TERMINAL.ascii).run()


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
    write_lines(screen(session.output, nodes, reservations, endpoints, holders, marked))
    sys.stdout.flush()
