"""`gpuscalectl top` and `status`: GPUs, reservations, endpoints and health, live or once. The live screen is in `dashboard`."""

import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial

from gpuscale.api.monitor.v1 import ListNodesRequest
from gpuscale.cli.console import lookup
from gpuscale.cli.console.command import NOBODY, Session, command
from gpuscale.cli.console.errors import ExitCode, known, leave
from gpuscale.cli.console.output import to_dict
from gpuscale.cli.console.terminal import TERMINAL, write_lines
from gpuscale.cli.grammar.parameters import option
from gpuscale.cli.views import monitor
from gpuscale.cli.views.allocator import RESERVATIONS
from gpuscale.cli.views.autoscaler import ENDPOINTS
from gpuscale.client.states import gpu_state, marks, node_state
from gpuscale.common.errors import GpuscaleError
from gpuscale.common.rpc.status import PROBLEM_KEY
from gpuscale.common.sizes import counted

_OF_ALL = {*NOBODY, "UNIMPLEMENTED"}
"""Reasons of errors that the other services would give too."""


@command("top")
@option(
    "--once", is_flag=True, help="Print one screen and exit, like `status`; the default without a terminal."
)
def top(session: Session, once: bool) -> None:
    """Show GPUs, reservations, endpoints, decisions and health on one live screen; q quits, the last line shows the other keys."""
    if once or not session.output.human or not sys.stdout.isatty():
        show_status(session)
        return
    try:
        from gpuscale.dashboard.terminal import Top
    except ModuleNotFoundError as error:
        message = f"the live screen is not installed ({error.name} is missing): pip install 'gpuscale[cli]', or use status"
        raise GpuscaleError(message, reason="NOT_INSTALLED") from error
    with session.connect() as client:  # fail here with one line, not on a full screen
        known("nodes", partial(client.fleet.ListNodes, ListNodesRequest(page_size=1)), _OF_ALL)
    program = [sys.executable, "-m", "gpuscale.cli.main", *session.options()]
    Top(session.connect_async, program, ascii_only=TERMINAL.ascii).run()


def show_status(session: Session) -> None:
    """Show the fleet at a glance: free GPUs, holders, endpoints and problems."""
    output = session.output
    with session.connect() as client:
        about = lookup.About(silent=session.silent)
        nodes = known("nodes", partial(lookup.nodes, client, (), about), _OF_ALL)
        reservations = known("reservations and cordons", partial(lookup.reservations, client, (), about))
        endpoints = known("endpoints", partial(lookup.endpoints, client, (), about))
        events = known("health events", partial(lookup.health, client, (), about))
        cordons = None if reservations is None else known("cordons", partial(lookup.cordons, client))
        answers = {"fleet": nodes, "allocator": reservations, "autoscaler": endpoints} if output.human else {}
        told = [
            known(f"problems of the {name}", partial(lookup.told, client, name))
            for name, items in answers.items()
            if items is not None
        ]
    marked = marks(cordons or ())
    of = {"nodes": nodes, "reservations": reservations, "endpoints": endpoints, "healthEvents": events}
    failed = ExitCode.UNAVAILABLE if None in (*of.values(), cordons, *told) else ExitCode.OK
    if not output.human:
        listed = {key: [to_dict(item) for item in items] for key, items in of.items() if items is not None}
        output.write_data(listed)
        leave(failed)
    there, holders = nodes or [], lookup.holders(reservations or ())
    gpus = [gpu for node in there for gpu in node.snapshot.gpus]
    states = Counter(node_state(node, marked) for node in there)
    free = sum(gpu.uuid not in holders and gpu_state(gpu, marked) == "OK" for gpu in gpus)
    held = sum(gpu.uuid in holders for gpu in gpus)
    use = f"{free} free, {held} held" + (
        f", {closed} not for new work" if (closed := len(gpus) - free - held) > 0 else ""
    )
    wrong = [one[PROBLEM_KEY] for one in told if one and PROBLEM_KEY in one]
    ill = any(map(monitor.node_problem, there))
    stand = ", ".join(f"{count} {state}" for state, count in states.items()) or "no agent reports"
    lines = [
        _count(nodes and gpus, "GPU", "use unknown" if reservations is None else use),
        _count(nodes, "node", stand),
        f"{_count(reservations, 'reservation')}, {_count(endpoints, 'endpoint')}, "
        + (
            "nothing is wrong"
            if events == [] and not (ill or wrong or None in told)
            else _count(events, "health event")
        ),
        *wrong,
    ]
    tables = (
        (events, output.table(events or (), monitor.HEALTH)),
        (nodes, output.table(there, monitor.nodes(marked, problems=ill))),
        (gpus, output.table(gpus, monitor.gpus(holders, marked))),
        (reservations, output.table(reservations or (), RESERVATIONS)),
        (endpoints, output.table(endpoints or (), ENDPOINTS)),
    )
    for items, table in tables:
        lines += ["", *table] if items else []
    write_lines(lines)
    sys.stdout.flush()
    leave(failed)


status = command("status", name="status")(show_status)


def _count(items: Sequence[object] | None, noun: str, more: str = "") -> str:
    return f"{noun}s unknown" if items is None else f"{counted(len(items), noun)}{more and f': {more}'}"
