"""`gpuscalectl get`: what there is, as a table or as data."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from gpuscale.cli.console.session import note, session_of
from gpuscale.cli.grammar.options import Names

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from gpuscale.cli.console.cells import View
    from gpuscale.client import Client
    from gpuscale.client.states import Marks

    M = TypeVar("M", bound=Message)

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

_HINTS = {
    "nodes": "none: no agent reports to this fleet yet; on each GPU host: gpuscale-agent --fleet-address HOST:PORT",
    "reservations": "none; reserve GPUs with: gpuscalectl reserve --gpus 1",
    "endpoints": "none; make one with: gpuscalectl preset show keda --watcher NAME | gpuscalectl apply -f -",
    "queueWatchers": "none; what one looks like: gpuscalectl explain watcher.spec",
}
"""What to do where there is nothing yet."""
Ended = Annotated[bool, typer.Option("--all", "-a", help="Ended ones too.")]
OfEndpoint = Annotated[
    str, typer.Option("--endpoint", "-e", metavar="NAME", help="Only those of this endpoint.")
]


def _write(context: typer.Context, items: "Sequence[M]", view: "View[M]", typed: list[str] | None) -> None:
    """One name gives the object itself, everything else a list."""
    output = session_of(context).output
    if typed and len(typed) == 1:
        output.write_one(items[0], view)
        return
    output.write_list(items, view)
    output.note_none(items, _HINTS.get(view.key, "none"))


@app.command()
def nodes(context: typer.Context, name: Names = None) -> None:
    """Hosts with an agent: state, CPU, memory, load."""
    from gpuscale.cli.console import resources
    from gpuscale.cli.views import monitor
    from gpuscale.client.states import NO_MARKS, problem

    session = session_of(context)
    with session.connect() as client:
        found = resources.nodes(client, name or ())
        marked = _marks(client) if session.output.human else NO_MARKS
    _write(context, found, monitor.nodes(marked, problems=any(map(problem, found))), name)


@app.command()
def gpus(
    context: typer.Context,
    name: Names = None,
    node: Annotated[str, typer.Option(metavar="NAME", help="Only those of this node.")] = "",
) -> None:
    """GPUs: use, memory, temperature, power, and who holds them. A name may be the UUID alone."""
    from gpuscale.cli.console import resources
    from gpuscale.cli.views import monitor

    session = session_of(context)
    with session.connect() as client:
        found = resources.gpus(resources.nodes(client, [node] if node else ()), name or ())
        view = monitor.gpus(_holders(client), _marks(client)) if session.output.human else monitor.gpus({})
    _write(context, found, view, name)


def _holders(client: "Client") -> dict[str, str]:
    """Who holds each GPU; unknown while the allocator is away, which does not hide the GPUs."""
    from gpuscale.cli.console import resources
    from gpuscale.common.errors import UnavailableError

    try:
        return dict(resources.holders(resources.reservations(client)))
    except UnavailableError as error:
        note(f"holders are unknown: {error.message}")
        return {}


def _marks(client: "Client") -> "Marks":
    """What is cordoned; unknown while the allocator is away."""
    from gpuscale.cli.console import resources
    from gpuscale.client.states import marks
    from gpuscale.common.errors import UnavailableError

    try:
        return marks(resources.cordons(client))
    except UnavailableError as error:
        note(f"cordons are unknown: {error.message}")
        return {}


@app.command()
def reservations(
    context: typer.Context,
    name: Names = None,
    holder: Annotated[str, typer.Option(metavar="NAME", help="Only those of this holder.")] = "",
    ended: Ended = False,
) -> None:
    """GPUs held under a lease, and what is left of it."""
    from gpuscale.cli.console import resources
    from gpuscale.cli.views.allocator import RESERVATIONS

    with session_of(context).connect() as client:
        found = resources.reservations(client, name or (), holder=holder, ended=ended)
    _write(context, found, RESERVATIONS, name)


@app.command()
def endpoints(context: typer.Context, name: Names = None) -> None:
    """Things that have replicas: bounds, desired, granted, ready, and why."""
    from gpuscale.cli.console import resources
    from gpuscale.cli.views.autoscaler import ENDPOINTS

    with session_of(context).connect() as client:
        found = resources.endpoints(client, name or ())
    _write(context, found, ENDPOINTS, name)


@app.command()
def replicas(
    context: typer.Context, name: Names = None, endpoint: OfEndpoint = "", ended: Ended = False
) -> None:
    """Running worker groups of endpoints. A name is ENDPOINT/REPLICA."""
    from gpuscale.cli.console import resources
    from gpuscale.cli.views.autoscaler import REPLICAS

    with session_of(context).connect() as client:
        found = resources.replicas(client, name or (), endpoint=endpoint, ended=ended)
    _write(context, found, REPLICAS, name)


@app.command()
def watchers(context: typer.Context, name: Names = None) -> None:
    """Queue watchers and what they read last."""
    from gpuscale.cli.console import resources
    from gpuscale.cli.views.autoscaler import WATCHERS

    with session_of(context).connect() as client:
        found = resources.watchers(client, name or ())
    _write(context, found, WATCHERS, name)


@app.command()
def decisions(
    context: typer.Context,
    name: Names = None,
    endpoint: OfEndpoint = "",
    limit: Annotated[int, typer.Option(min=1, help="How many, newest first.")] = 20,
) -> None:
    """Why endpoints have the replicas they have. A name is ENDPOINT/DECISION."""
    from gpuscale.cli.console import resources
    from gpuscale.cli.views.autoscaler import DECISIONS

    with session_of(context).connect() as client:
        found = resources.decisions(client, name or (), endpoint=endpoint, limit=limit)
    _write(context, found, DECISIONS, name)


@app.command()
def adapters(context: typer.Context, name: Names = None) -> None:
    """Worker adapters: what starts and stops replicas."""
    from gpuscale.cli.console import resources
    from gpuscale.cli.views.autoscaler import ADAPTERS

    with session_of(context).connect() as client:
        found = resources.adapters(client, name or ())
    _write(context, found, ADAPTERS, name)


@app.command()
def metrics(context: typer.Context, name: Names = None) -> None:
    """Metrics that programs report. A name is ENDPOINT, with its replicas, or ENDPOINT/REPLICA."""
    from gpuscale.api.autoscaler import v1 as api
    from gpuscale.cli.console import resources
    from gpuscale.cli.views.autoscaler import METRICS
    from gpuscale.client import pages
    from gpuscale.common import names

    parents = [
        full
        if names.match(names.ENDPOINT, full := resources.canonical(one))
        else resources.full_name(names.REPLICA if "/" in one else names.ENDPOINT, one)
        for one in name or ()
    ]
    with session_of(context).connect() as client:
        found = [
            metric
            for parent in parents or [""]
            for page in pages(client.metrics.ListMetrics, api.ListMetricsRequest(parent=parent))
            for metric in page.metrics
        ]
    _write(context, found, METRICS, None)


@app.command()
def cordons(context: typer.Context, name: Names = None) -> None:
    """Nodes and GPUs on which nothing new is placed, and what is still there."""
    from gpuscale.cli.console import resources
    from gpuscale.cli.views.capacity import CORDONS

    with session_of(context).connect() as client:
        found = resources.cordons(client, name or ())
    _write(context, found, CORDONS, name)
