"""`gpuscalectl top`: nodes, GPUs with bars, reservations and endpoints on one screen, live on a terminal, or once."""

import sys
from collections.abc import Mapping, Sequence

from google.protobuf.message import Message

from gpuscale.api.allocator.v1 import Reservation
from gpuscale.api.autoscaler.v1 import Endpoint
from gpuscale.api.monitor.v1 import ListNodesRequest, Node
from gpuscale.api.types.v1 import Gpu
from gpuscale.cli.console import lookup
from gpuscale.cli.console.cells import Column, View, duration, gpu_model, number, short, text
from gpuscale.cli.console.command import command
from gpuscale.cli.console.output import ABSENT, Output, to_dict
from gpuscale.cli.console.session import NOBODY, Session
from gpuscale.cli.console.terminal import TERMINAL, write_lines
from gpuscale.cli.grammar.parameters import option
from gpuscale.cli.views.allocator import RESERVATIONS
from gpuscale.cli.views.autoscaler import ENDPOINTS
from gpuscale.cli.views.monitor import nodes as nodes_view
from gpuscale.client.states import Marks, gpu_state, marks, problem
from gpuscale.common.errors import GpuscaleError, UnavailableError

BAR_WIDTH = 20


@command("top --once")
@option("--once", is_flag=True, help="Print one screen and exit, as without a terminal.")
def top(session: Session, once: bool) -> None:
    """GPUs, reservations, endpoints, decisions and health on one screen; q quits, the last line shows the other keys."""
    if once or not session.output.human or not sys.stdout.isatty():
        with session.connect() as client:
            nodes = lookup.nodes(client)
            reservations = lookup.reservations(client)
            endpoints = lookup.endpoints(client)
            if not session.output.human:
                listed = (("nodes", nodes), ("reservations", reservations), ("endpoints", endpoints))
                data = {key: [to_dict(item) for item in items] for key, items in listed}
                session.output.write_data(data)
                return
            holders, marked = lookup.holders(reservations), marks(lookup.cordons(client))
        write_lines(screen(session.output, nodes, reservations, endpoints, holders, marked))
        sys.stdout.flush()
        return
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


def bar(share: float | None) -> str:
    """`|||||||             ` for a share from 0 to 1; `-` where it is unknown."""
    if share is None:
        return ABSENT.ljust(BAR_WIDTH)
    return ("|" * round(min(max(share, 0.0), 1.0) * BAR_WIDTH)).ljust(BAR_WIDTH)


def gauge(reading: Message, field: str, whole: float) -> str:
    """`[||||      ]  20%`: the share of the whole that is in a field of a reading."""
    share = getattr(reading, field) / whole if reading.HasField(field) and whole > 0 else None
    return f"[{bar(share)}] " + (ABSENT if share is None else f"{share:4.0%}")


def screen(
    output: Output,
    nodes: Sequence[Node],
    reservations: Sequence[Reservation],
    endpoints: Sequence[Endpoint],
    holders: Mapping[str, str],
    marked: Marks,
) -> list[str]:
    """The lines of the screen: a table for each kind of thing that there is."""
    gpus = View[Gpu](
        "gpus",
        (
            Column("NODE", lambda gpu: short(gpu.name).partition("/")[0]),
            Column("GPU", lambda gpu: str(gpu.index)),
            Column("MODEL", gpu_model),
            Column("STATE", lambda gpu: gpu_state(gpu, marked)),
            Column("UTILIZATION", lambda gpu: gauge(gpu.reading, "utilization_percent", 100)),
            Column(
                "MEMORY", lambda gpu: gauge(gpu.reading, "memory_used_bytes", gpu.reading.memory_total_bytes)
            ),
            Column("TEMP", lambda gpu: number(gpu.reading, "temperature_celsius", "{:.0f}C".format)),
            Column("POWER", lambda gpu: number(gpu.reading, "power_watts", "{:.0f}W".format)),
            Column("HOLDER", lambda gpu: text(holders.get(gpu.name, ""))),
            Column("AGE", lambda gpu: duration(gpu.reading, "age")),
        ),
    )
    tables = (
        output.table(nodes, nodes_view(marked, problems=any(map(problem, nodes)))),
        output.table([gpu for node in nodes for gpu in node.snapshot.gpus], gpus),
        output.table(reservations, RESERVATIONS),
        output.table(endpoints, ENDPOINTS),
    )
    counts = (len(nodes), sum(len(node.snapshot.gpus) for node in nodes), len(reservations), len(endpoints))
    titles = ("NODES", "GPUS", "RESERVATIONS", "ENDPOINTS")
    lines: list[str] = []
    for title, count, table in zip(titles, counts, tables, strict=True):
        lines += [f"{title}: {count}", *(f"  {line}" for line in table if count), ""]
    return lines[:-1]
