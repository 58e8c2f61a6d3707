"""`gpuscalectl get` and `snapshot`: the resources there are, as a table or as data."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import click

from gpuscale.cli.commands.watching import GetCommand
from gpuscale.cli.console.command import command, names, names_of
from gpuscale.cli.console.output import to_dict
from gpuscale.cli.console.session import Session
from gpuscale.cli.console.terminal import note, write_lines
from gpuscale.cli.grammar.jsonpath import Format
from gpuscale.cli.grammar.nouns import canonical, full_name, tenant_of
from gpuscale.cli.grammar.parameters import DURATION, POSITIVE, When, option, takes
from gpuscale.common.errors import NotFoundError, UnavailableError
from gpuscale.common.names import ENDPOINT, REPLICA, RULE, match

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from gpuscale.cli.console.cells import View
    from gpuscale.cli.console.lookup import About
    from gpuscale.client import Client
    from gpuscale.client.states import Marks
    from gpuscale.common.wire import TimeRange

    M = TypeVar("M", bound=Message)

Names = tuple[str, ...]
OF_GPU = option(
    "--gpu",
    default="",
    metavar="GPU",
    help="Only of this GPU: its UUID, the beginning of it, or NODE/INDEX.",
    shell_complete=names_of("gpus"),
)
ENDED = option("--all", "-a", "ended", is_flag=True, help="Include ended ones.")
OF_ENDPOINT = option(
    "--endpoint",
    "-e",
    default="",
    metavar="NAME",
    help="Only of this endpoint.",
    shell_complete=names_of("endpoints"),
)
OF_NODE = option(
    "--node", default="", metavar="NAME", help="Only of this node.", shell_complete=names_of("nodes")
)
_HINTS = {
    "nodes": "none: no agent reports to this fleet yet; start one on each GPU host: gpuscale-agent --fleet-address HOST:PORT",
    "reservations": "none; reserve GPUs with: gpuscalectl reserve --gpus 1",
    "jobs": "none runs; start one with: gpuscalectl run -d --gpus 1 -- COMMAND",
    "endpoints": "none; create one with: gpuscalectl preset show keda --watcher NAME | gpuscalectl apply -f -",
    "queueWatchers": "none; for the fields of one: gpuscalectl explain watcher.spec",
    "healthEvents": "nothing is wrong",
}
"""What to do where a list is empty."""


def get(noun: str, example: str) -> Callable[[Callable[..., object]], click.Command]:
    """A decorator that makes a command of `get` of a function that takes names."""

    def decorate(function: Callable[..., object]) -> click.Command:
        return command(f"get {example}", kind=GetCommand)(names(noun, required=False)(function))

    return decorate


def _write(session: Session, items: "Sequence[M]", view: "View[M]", typed: Names) -> None:
    """One name gives the object itself, everything else a list."""
    if len(typed) == 1:
        session.output.write_one(items[0], view)
        return
    session.output.write_list(items, view)
    session.output.note_none(items, _HINTS.get(view.key, "none"))


def _show(session: Session, typed: Names, view: "View[M]", read: "Callable[[Client], Sequence[M]]") -> None:
    """Read what was asked for, and write it."""
    with session.connect() as client:
        found = read(client)
    _write(session, found, view, typed)


@get("nodes", "nodes -o wide")
def nodes(session: Session, name: Names) -> None:
    """Hosts with an agent: state, CPU, memory, load."""
    from gpuscale.cli.console import lookup
    from gpuscale.cli.views import monitor
    from gpuscale.client.states import NO_MARKS, problem

    with session.connect() as client:
        found = lookup.nodes(client, name)
        marked = _marks(client) if session.output.human else NO_MARKS
    _write(session, found, monitor.nodes(marked, problems=any(map(problem, found))), name)


@get("gpus", "gpus --node host-1 --sort-by -UTIL")
@OF_NODE
def gpus(session: Session, name: Names, node: str) -> None:
    """GPUs: utilization, memory, temperature, power, and who holds them. A NAME may be the UUID alone."""
    from gpuscale.cli.console import lookup
    from gpuscale.cli.views import monitor

    with session.connect() as client:
        found = lookup.gpus(lookup.nodes(client, [node] if node else ()), name)
        view = monitor.gpus({})
        if session.output.human:
            holders: Mapping[str, str] = {}
            try:
                holders = lookup.holders(lookup.reservations(client))
            except UnavailableError as error:  # while the allocator is down, which does not hide the GPUs
                note(f"holders are unknown: {error.message}")
            view = monitor.gpus(holders, _marks(client))
    _write(session, found, view, name)


def _marks(client: "Client") -> "Marks":
    """What is cordoned; unknown while the allocator is down."""
    from gpuscale.cli.console import lookup
    from gpuscale.client.states import marks

    try:
        return marks(lookup.cordons(client))
    except UnavailableError as error:
        note(f"cordons are unknown: {error.message}")
        return {}


@get("reservations", "reservations --holder me --watch")
@option("--holder", default="", metavar="NAME", help="Only of this holder.")
@OF_GPU
@takes("when", When)
@ENDED
def reservations(session: Session, name: Names, holder: str, gpu: str, when: When, ended: bool) -> None:
    """GPUs held under a lease, and how much time is left of it; of a time in the past, who held them from when to when."""
    from gpuscale.cli.console import lookup
    from gpuscale.cli.views.allocator import HELD_THEN, RESERVATIONS

    time = when.range()
    _show(
        session,
        name,
        HELD_THEN if time else RESERVATIONS,
        lambda client: lookup.reservations(
            client, name, holder=holder, ended=ended, about=_about(client, gpu, time)
        ),
    )


def _about(client: "Client", gpu: str, time: "TimeRange") -> "About":
    from gpuscale.cli.console import lookup

    return lookup.About(lookup.gpu_uuid(client, gpu) if gpu else "", time)


@get("jobs", "jobs --all")
@ENDED
def jobs(session: Session, name: Names, ended: bool) -> None:
    """Commands that `run` started: state, exit code, and where. A NAME is a job's name or title."""
    from gpuscale.cli.console import lookup
    from gpuscale.cli.views.allocator import JOB_MEMBERS, JOBS

    with session.connect() as client:
        found = lookup.jobs(client, name, ended=ended)
    _write(session, found, JOBS, name)
    if len(name) == 1 and session.output.human:
        job = found[0].job
        why = ["", job.queue_reason] if job.queue_reason else []
        write_lines(["", *session.output.table(job.members, JOB_MEMBERS), "", job.command, *why])


@get("endpoints", "endpoints jobs -o yaml")
def endpoints(session: Session, name: Names) -> None:
    """Scaled workloads: bounds, desired, granted and ready replicas, and why."""
    from gpuscale.cli.console import lookup
    from gpuscale.cli.views.autoscaler import ENDPOINTS

    _show(session, name, ENDPOINTS, lambda client: lookup.endpoints(client, name))


@get("replicas", "replicas --endpoint jobs -l state=ready")
@OF_ENDPOINT
@OF_GPU
@takes("when", When)
@ENDED
def replicas(session: Session, name: Names, endpoint: str, gpu: str, when: When, ended: bool) -> None:
    """Worker groups of endpoints. A NAME is ENDPOINT/REPLICA."""
    from gpuscale.cli.console import lookup
    from gpuscale.cli.views.autoscaler import REPLICAS

    time = when.range()
    _show(
        session,
        name,
        REPLICAS,
        lambda client: lookup.replicas(
            client, name, endpoint=endpoint, ended=ended, about=_about(client, gpu, time)
        ),
    )


@get("watchers", "watchers -o custom-columns=NAME:.name,READY:.status.readyCount")
def watchers(session: Session, name: Names) -> None:
    """Queue watchers, and what they last read."""
    from gpuscale.cli.console import lookup
    from gpuscale.cli.views.autoscaler import WATCHERS

    _show(session, name, WATCHERS, lambda client: lookup.watchers(client, name))


@get("decisions", "decisions --endpoint jobs --limit 5")
@OF_ENDPOINT
@takes("when", When)
@option(
    "--limit", type=POSITIVE, help="Most decisions to show, newest first; 20, or all of the time, by default."
)
def decisions(session: Session, name: Names, endpoint: str, when: When, limit: int | None) -> None:
    """Why endpoints have the replicas they have. A NAME is ENDPOINT/DECISION."""
    from gpuscale.cli.console import lookup
    from gpuscale.cli.views.autoscaler import DECISIONS

    time = when.range()
    most = limit if limit or time else 20
    _show(
        session,
        name,
        DECISIONS,
        lambda client: lookup.decisions(
            client, name, endpoint=endpoint, limit=most, about=lookup.About("", time)
        ),
    )


@get("adapters", "adapters")
def adapters(session: Session, name: Names) -> None:
    """Worker adapters, which start and stop replicas."""
    from gpuscale.cli.console import lookup
    from gpuscale.cli.views.autoscaler import ADAPTERS

    _show(session, name, ADAPTERS, lambda client: lookup.adapters(client, name))


@get("endpoints", "metrics jobs")
def metrics(session: Session, name: Names) -> None:
    """Metrics that programs report. A NAME is ENDPOINT, with its replicas, or ENDPOINT/REPLICA."""
    from gpuscale.api.autoscaler import v1 as api
    from gpuscale.cli.views.autoscaler import METRICS
    from gpuscale.client import pages

    parents = [
        full
        if match(ENDPOINT, full := canonical(one))
        else full_name(REPLICA if "/" in one else ENDPOINT, one)
        for one in name
    ]
    with session.connect() as client:
        found = [
            metric
            for parent in parents or [""]
            for page in pages(client.metrics.ListMetrics, api.ListMetricsRequest(parent=parent))
            for metric in page.metrics
        ]
    _write(session, found, METRICS, ())


@get("cordons", "cordons")
def cordons(session: Session, name: Names) -> None:
    """Nodes and GPUs closed for new work, and what still runs there."""
    from gpuscale.cli.console import lookup
    from gpuscale.cli.views.allocator import CORDONS

    _show(session, name, CORDONS, lambda client: lookup.cordons(client, name))


@get("recordings", "recordings -o json")
def recordings(session: Session, name: Names) -> None:
    """Recordings of GPUs: samples and duration. A single one with its figures, as `record` prints them."""
    from gpuscale.cli.commands.recordings import write
    from gpuscale.cli.console import lookup
    from gpuscale.cli.views.monitor import RECORDINGS

    with session.connect() as client:
        found = lookup.recordings(client, name)
    if len(name) != 1:
        _write(session, found, RECORDINGS, name)
        return
    if session.output.human:
        session.output.write_one(found[0], RECORDINGS)
    write(session, found[0])


@get("backtests", "backtests --watch")
def backtests(session: Session, name: Names) -> None:
    """Backtests that run or ran. A single one with its figures, as `backtest` prints them."""
    from gpuscale.cli.commands.backtest import figures
    from gpuscale.cli.console import lookup
    from gpuscale.cli.views.backtests import BACKTESTS, report_lines

    with session.connect() as client:
        found = lookup.backtests(client, name)
        one = len(name) == 1 and session.output.format is not Format.NAME
        shown = figures(client, found[0]) if one else None
    if shown is None:
        _write(session, found, BACKTESTS, name)
    elif session.output.human:
        session.output.write_one(found[0], BACKTESTS)
        write_lines(["", *report_lines(session.output, shown)])
    else:
        session.output.write_data({**to_dict(found[0]), **to_dict(shown)})


@get("", "health --watch")
@OF_NODE
@OF_GPU
@takes("when", When)
@option("--all", "-a", "ended", is_flag=True, help="Include resolved ones.")
def health(session: Session, name: Names, node: str, gpu: str, when: When, ended: bool) -> None:
    """What is wrong with nodes and GPUs, newest first, and what to do about it."""
    from gpuscale.cli.console import lookup
    from gpuscale.cli.views.monitor import HEALTH

    time = when.range()
    with session.connect() as client:
        found = lookup.health(client, name, node=node, ended=ended, about=_about(client, gpu, time))
    _write(session, found, HEALTH, name)


@get("rules", "rules jobs/up -o yaml")
@OF_ENDPOINT
@option("--kind", default="", metavar="KIND", help="Only of this kind, such as step.")
@option("--signal", default="", metavar="ID", help="Only those that read this signal.")
@option("--disabled/--enabled", default=None, help="Only disabled or enabled ones.")
def rules(
    session: Session, name: Names, endpoint: str, kind: str, signal: str, disabled: bool | None
) -> None:
    """Rules of endpoints, in the order in which they apply. A NAME is ENDPOINT/RULE."""
    from gpuscale.api.autoscaler import v1 as api
    from gpuscale.cli.console import lookup
    from gpuscale.cli.views.autoscaler import RULES

    with session.connect() as client:
        if name:
            wanted = [api.GetRuleRequest(name=full_name(RULE, one)) for one in name]
            found = [client.rules.GetRule(request).rule for request in wanted]
        else:
            found = lookup.rules(client, endpoint, kind, signal, disabled=disabled)
    _write(session, found, RULES, name)


@get("quotas", "quotas")
def quotas(session: Session, name: Names) -> None:
    """Tenants: what each holds, may hold, and waits for. A NAME is that of a tenant."""
    from gpuscale.cli.console import lookup
    from gpuscale.cli.views.allocator import QUOTAS

    with session.connect() as client:
        known = {quota.tenant: quota for quota in lookup.quotas(client)}
    tenants = [*map(tenant_of, name)]
    for one in tenants:
        if one not in known:
            raise NotFoundError(f"tenant {one} has no quota and holds nothing: not found")
    _write(session, [known[one] for one in tenants] if name else list(known.values()), QUOTAS, name)


@command("--address host-1:7071 snapshot --fresh")
@option("--max-age", type=DURATION, default="5s", help="Oldest reading to accept.")
@option("--fresh", is_flag=True, help="Read now, however new the last reading is.")
def snapshot(session: Session, max_age: float, fresh: bool) -> None:
    """Show the GPUs of one host as the agent at --address reads them."""
    from gpuscale.api.monitor import v1 as api
    from gpuscale.cli.views import monitor
    from gpuscale.common.wire import to_duration

    request = api.GetSnapshotRequest(max_age=to_duration(0.0 if fresh else max_age))
    with session.connect() as client:
        found = client.agent.GetSnapshot(request).snapshot
    if not session.output.human:
        session.output.write_data(to_dict(found))
        return
    session.output.write_list(found.gpus, monitor.gpus({}))
    if found.gpu_problem:
        note(f"{found.node}: {found.gpu_problem}")
