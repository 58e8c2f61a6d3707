"""`gpuscalectl get` and `snapshot`: resources as a table or as data."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from textwrap import wrap
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpuscale.api.audit import v1 as audit_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.cli.commands.watching import GetCommand
from gpuscale.cli.console import lookup
from gpuscale.cli.console.command import Session, command, names, names_of
from gpuscale.cli.console.errors import known
from gpuscale.cli.console.output import Chosen, name_of, to_dict
from gpuscale.cli.console.terminal import note, printable, terminal_width, write_lines
from gpuscale.cli.grammar.jsonpath import Format
from gpuscale.cli.grammar.nouns import full_name
from gpuscale.cli.grammar.parameters import DURATION, POSITIVE, When, option, takes
from gpuscale.cli.views import allocator, autoscaler, monitor
from gpuscale.common import wire
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.names import ENDPOINT

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from gpuscale.cli.console.cells import View
    from gpuscale.client import Client
    from gpuscale.client.states import Marks

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
_OF_OTHERS = frozenset({"policyActs", "powerChanges"})
"""Kinds that are also known by the name of what made them."""
_HINTS = {
    "nodes": "none: no agent reports to this fleet yet; start one on each GPU host: gpuscale-agent --fleet-address HOST:PORT",
    "reservations": "none; reserve GPUs with: gpuscalectl reserve --gpus 1",
    "jobs": "none runs; start one with: gpuscalectl run -d --gpus 1 -- COMMAND",
    "endpoints": "none; create one with: gpuscalectl preset show keda --watcher NAME | gpuscalectl apply -f -",
    "queueWatchers": "none; for the fields of one: gpuscalectl explain watcher.spec",
    "processes": "nothing runs on these GPUs",
    "healthEvents": "nothing is wrong",
    "usePolicies": "none; for the fields of one: gpuscalectl explain policy.spec",
    "powerBudgets": "none; for the fields of one: gpuscalectl explain budget.spec",
    "notifications": "none: targets were told of everything",
}
"""A hint for each kind whose list is empty."""


def get(noun: str, example: str) -> Callable[[Callable[..., object]], click.Command]:
    """A decorator: makes a function that takes names a command of `get`."""

    def decorate(function: Callable[..., object]) -> click.Command:
        return command(f"get {example}", kind=GetCommand)(names(noun, required=False)(function))

    return decorate


def _listing(noun: str, example: str, view: "Callable[[], View[Any]]", says: str) -> click.Command:
    """A command of `get` for a kind without options of its own."""

    def function(session: Session, name: Names) -> None:
        _show(session, name, view(), lookup.READERS[noun])

    function.__name__, function.__doc__ = noun, says
    return get(noun, example)(function)


def _write(session: Session, items: "Sequence[M]", view: "View[M]", typed: Names) -> None:
    """One name gives the object itself, everything else a list, such as that of a policy the list of its acts."""
    ids = [one.rpartition("/")[2] for one in (*typed, *map(name_of, items))]
    if len(typed) == len(items) == 1 and (view.key not in _OF_OTHERS or ids[0] == ids[1]):
        session.output.write_one(items[0], view)
        return
    session.output.write_list(items, view)
    chosen = session.output.chosen
    session.output.note_none(
        items, "none is selected" if chosen.conditions or chosen.filter else _HINTS.get(view.key, "none")
    )


def _show(
    session: Session,
    typed: Names,
    view: "View[M]",
    read: "Callable[..., Sequence[M]]",
    *,
    gpu: str = "",
    time: "wire.TimeRange | None" = None,
    **asked: object,
) -> "Sequence[M]":
    with session.connect() as client:
        about = _about(session, view)
        about.gpu, about.time = gpu and lookup.gpu_uuid(client, gpu), time or about.time
        found = read(client, typed, about, **asked)
    _write(session, found, view, typed)
    return found


def _about(session: Session, view: "View[M] | None" = None, fields: Sequence[str] = ()) -> "lookup.About":
    """What the options choose of a view; of a watch only `fields`, where a table shows no others."""
    chosen = session.output.chosen
    table = session.output.human and chosen == Chosen(watched=chosen.watched)
    return lookup.About(chosen=chosen, view=view, fields=fields if table else (), silent=session.silent)


def _shows(session: Session) -> bool:
    """Whether columns are shown, or things are chosen by them."""
    chosen = session.output.chosen
    return session.output.human or bool(chosen.conditions or chosen.sort_by)


@get("nodes", "nodes -o wide")
def nodes(session: Session, name: Names) -> None:
    """List hosts with an agent: state, CPU, memory, load."""
    from gpuscale.client.states import NO_MARKS

    with session.connect() as client:
        found = lookup.nodes(client, name, _about(session, monitor.nodes(), monitor.NODE_FIELDS))
        marked = _marks(session, client) if _shows(session) else NO_MARKS
    _write(session, found, monitor.nodes(marked, problems=any(map(monitor.node_problem, found))), name)


@get("gpus", "gpus --node host-1 --sort-by -UTIL")
@OF_NODE
def gpus(session: Session, name: Names, node: str) -> None:
    """List GPUs: utilization, memory, temperature, power and holder. A NAME may be a UUID."""
    everything, view = _about(session, fields=monitor.GPU_FIELDS), monitor.gpus({})
    with session.connect() as client:
        of = lookup.nodes(client, [node] if node else (), everything)
        found = lookup.gpus(of, name, _about(session, view))
        if _shows(session):
            view = monitor.gpus(holders_known(client, everything), _marks(session, client))
    _write(session, found, view, name)


def holders_known(client: "Client", about: "lookup.About | None" = None) -> Mapping[str, str]:
    """The holder of each reserved GPU; of none, with a note, while the allocator is down or hangs."""
    read = partial(lookup.reservations, client, (), about or lookup.EVERYTHING)
    return lookup.holders(known("holders", read) or ())


@get("", "processes --node host-1 --sort-by -MEMORY")
@OF_NODE
@OF_GPU
def processes(session: Session, name: Names, node: str, gpu: str) -> None:
    """List processes on GPUs: user, start and memory. A NAME is a process id."""
    _show(session, name, monitor.PROCESSES, lookup.processes, gpu=gpu, node=node)


def _marks(session: Session, client: "Client") -> "Marks":
    """The cordons; none, with a note, while the allocator is down or hangs."""
    from gpuscale.client.states import marks

    return marks(known("cordons", partial(lookup.cordons, client, (), _about(session))) or ())


@get("reservations", "reservations --holder me --watch")
@option("--holder", default="", metavar="NAME", help="Only of this holder.")
@OF_GPU
@takes("when", When)
@ENDED
def reservations(session: Session, name: Names, holder: str, gpu: str, when: When, ended: bool) -> None:
    """List reservations: GPUs held under a lease, and the time left; for a time in the past, who held GPUs from when to when."""
    time = when.range()
    view = allocator.HELD_THEN if time else allocator.RESERVATIONS
    _show(session, name, view, lookup.reservations, gpu=gpu, time=time, holder=holder, ended=ended)


@get("jobs", "jobs --all")
@ENDED
def jobs(session: Session, name: Names, ended: bool) -> None:
    """List jobs, the commands started by `run`: state, exit code and nodes. A NAME is a job's name or title."""
    from gpuscale.client.jobs import why_ended
    from gpuscale.client.states import queued

    with session.connect() as client:
        found = lookup.jobs(client, name, _about(session, allocator.JOBS), ended=ended)
    _write(session, found, allocator.JOBS, name)
    if len(name) == 1 and session.output.human and session.output.chosen.watched is None:
        job = found[0].job
        why = ["", queued(job), *filter(None, [job.queue_order])] if job.queue_reason else []
        if (reason := why_ended(found[0])) and found[0].HasField("end_time"):
            why += ["", reason]
        lines = ["", *session.output.table(job.members, allocator.JOB_MEMBERS)] if job.members else []
        if job.earlier:
            lines += ["", f"It is at attempt {job.attempt}; before it:"]
            lines += session.output.table(job.earlier, allocator.JOB_MEMBERS)
        cut = [one for one in job.members if not any(line.endswith(one.end_reason) for line in lines)]
        why += [f"member {one.member}: {one.end_reason}" for one in cut]
        width = terminal_width()
        command = wrap(job.command, width, subsequent_indent="  ") if width else [job.command]
        write_lines([*lines, "", *command, *why])


@get("endpoints", "endpoints jobs -o yaml")
def endpoints(session: Session, name: Names) -> None:
    """Scaled workloads: bounds, desired, granted and ready replicas, and why; below the table, what is cut of that."""
    view, output, width = autoscaler.ENDPOINTS, session.output, terminal_width()
    found = _show(session, name, view, lookup.endpoints)
    if width and output.human and output.chosen.watched is None:
        from gpuscale.cli.console.cells import short

        kept, _ = output.chosen.pick(found, view)
        table = "\n".join(output.table(kept, view))
        cut = [
            f"{short(one.name)}: {one.status.summary}"
            for one in kept
            if printable(one.status.summary) not in table
        ]
        for line in cut:  # its end says the cause
            write_lines(["", *wrap(line, width, subsequent_indent="  ")])


@get("replicas", "replicas --endpoint jobs -l state=ready")
@OF_ENDPOINT
@OF_GPU
@takes("when", When)
@ENDED
def replicas(session: Session, name: Names, endpoint: str, gpu: str, when: When, ended: bool) -> None:
    """List replicas, the worker groups of endpoints. A NAME is ENDPOINT/REPLICA."""
    asked = {"endpoint": endpoint, "ended": ended}
    _show(session, name, autoscaler.REPLICAS, lookup.replicas, gpu=gpu, time=when.range(), **asked)


watchers = _listing(
    "watchers",
    "watchers -o custom-columns=NAME:.name,READY:.status.readyCount",
    lambda: autoscaler.WATCHERS,
    "Queue watchers, and what they last read.",
)


@get("decisions", "decisions --endpoint jobs --limit 5")
@OF_ENDPOINT
@takes("when", When)
@option(
    "--limit", type=POSITIVE, help="Most decisions to show, newest first; 20, or all of the time, by default."
)
def decisions(session: Session, name: Names, endpoint: str, when: When, limit: int | None) -> None:
    """List scaling decisions of endpoints. A NAME is ENDPOINT/DECISION."""
    time = when.range()
    most = limit if limit or time else 20
    _show(session, name, autoscaler.DECISIONS, lookup.decisions, time=time, endpoint=endpoint, limit=most)


adapters = _listing(
    "adapters", "adapters", lambda: autoscaler.ADAPTERS, "Worker adapters, which start and stop replicas."
)


@get("endpoints", "metrics jobs")
def metrics(session: Session, name: Names) -> None:
    """List metrics reported by programs. A NAME is ENDPOINT, including its replicas, or ENDPOINT/REPLICA."""
    with session.connect() as client:
        found = lookup.metrics(client, name, _about(session, autoscaler.METRICS))
    _write(session, found, autoscaler.METRICS, ())


cordons = _listing(
    "cordons",
    "cordons",
    lambda: allocator.CORDONS,
    "Nodes and GPUs closed to new work, and what still runs there.",
)


@get("recordings", "recordings -o json")
def recordings(session: Session, name: Names) -> None:
    """List recordings of GPUs: samples and duration. A single one is shown with its figures, as by `record`."""
    from gpuscale.cli.commands.recordings import write

    with session.connect() as client:
        found = lookup.recordings(client, name, _about(session, monitor.RECORDINGS))
    if len(name) != 1 or session.output.chosen.watched:
        _write(session, found, monitor.RECORDINGS, name)
        return
    if session.output.human:
        session.output.write_one(found[0], monitor.RECORDINGS)
    write(session, found)


@get("backtests", "backtests --watch")
def backtests(session: Session, name: Names) -> None:
    """List backtests. A single one is shown with its results, as by `backtest`."""
    from gpuscale.cli.commands.backtest import figures

    with session.connect() as client:
        found = lookup.backtests(client, name, _about(session, autoscaler.BACKTESTS))
        alone = len(name) == 1 and session.output.chosen.watched is None
        one = alone and session.output.format is not Format.NAME
        shown = figures(client, found[0]) if one else None
    if shown is None:
        _write(session, found, autoscaler.BACKTESTS, name)
    elif session.output.human:
        session.output.write_one(found[0], autoscaler.BACKTESTS)
        write_lines(["", *autoscaler.report_lines(session.output, shown)])
    else:
        session.output.write_data({**to_dict(found[0]), **to_dict(shown)})


@get("healthEvents", "health --watch")
@OF_NODE
@OF_GPU
@takes("when", When)
@option("--all", "-a", "ended", is_flag=True, help="Include resolved ones.")
def health(session: Session, name: Names, node: str, gpu: str, when: When, ended: bool) -> None:
    """List health problems of nodes and GPUs, newest first, and what to do about them."""
    _show(session, name, monitor.HEALTH, lookup.health, gpu=gpu, time=when.range(), node=node, ended=ended)


@get("rules", "rules jobs/up -o yaml")
@OF_ENDPOINT
@option("--kind", default="", metavar="KIND", help="Only of this kind, such as step.")
@option("--signal", default="", metavar="ID", help="Only those that read this signal.")
@option("--disabled/--enabled", default=None, help="Only disabled or enabled ones.")
def rules(
    session: Session, name: Names, endpoint: str, kind: str, signal: str, disabled: bool | None
) -> None:
    """List rules of endpoints, in the order they apply. A NAME is ENDPOINT/RULE."""
    with session.connect() as client:
        if name:
            found = lookup.rules(client, name)
        else:
            parent = full_name(ENDPOINT, endpoint) if endpoint else ""
            request = autoscaler_api.ListRulesRequest(
                parent=parent, kind=kind, signal=signal, disabled=disabled
            )
            found = _about(session, autoscaler.RULES).items(client.rules, request)
    _write(session, found, autoscaler.RULES, name)


quotas = _listing(
    "quotas",
    "quotas",
    lambda: allocator.QUOTAS,
    "Tenants: what each holds, may hold, and waits for. A NAME is that of a tenant.",
)


@get("bookings", "bookings")
@ENDED
def bookings(session: Session, name: Names, ended: bool) -> None:
    """List bookings of GPUs, the next one first."""
    _show(session, name, allocator.BOOKINGS, lookup.bookings, ended=ended)


policies = _listing(
    "policies",
    "policies -o wide",
    lambda: allocator.POLICIES,
    "Use policies: what is done about GPUs that are held and not used.",
)
acts = _listing(
    "acts",
    "policy-acts idle",
    lambda: allocator.ACTS,
    "What use policies did, or would have done, newest first. A NAME is that of a policy.",
)
targets = _listing(
    "targets", "targets", lambda: allocator.TARGETS, "Webhooks that get notifications about reservations."
)
notifications = _listing(
    "notifications",
    "notifications -l dead=true",
    lambda: allocator.NOTIFICATIONS,
    "Notifications that are not delivered yet, and those that are given up.",
)
budgets = _listing(
    "budgets",
    "budgets",
    lambda: allocator.BUDGETS,
    "Power budgets: what the GPUs of a node, a rack or the fleet may draw, and what they draw.",
)
changes = _listing(
    "changes",
    "power-changes",
    lambda: allocator.CHANGES,
    "How power limits of GPUs were changed, newest first, and why. A NAME is that of a budget.",
)


@command("get audit --since 1d --filter 'NOT code = OK'", kind=GetCommand)
@takes("when", When)
@option("--limit", type=POSITIVE, default=100, help="Most calls to show, newest first.")
def audit(session: Session, when: When, limit: int) -> None:
    """List calls from the audit log of the server at --address, newest first, for admins."""
    if session.output.chosen.watched:
        raise InvalidArgumentError("the audit log has no watch; repeat with --since")
    with session.connect() as client:
        about = _about(session, monitor.AUDIT)
        about.time = when.range()
        found = about.items(client.audit, audit_api.ListAuditEventsRequest(page_size=limit), limit=limit)
    _write(session, found, monitor.AUDIT, ())


@command("--address host-1:7071 snapshot --fresh")
@option("--max-age", type=DURATION, default="5s", help="Maximum age of the reading.")
@option("--fresh", is_flag=True, help="Read now, even if the last reading is recent.")
def snapshot(session: Session, max_age: float, fresh: bool) -> None:
    """Show the GPUs of one host as the agent at --address reads them."""
    request = monitor_api.GetSnapshotRequest(max_age=wire.to_duration(0.0 if fresh else max_age))
    with session.connect() as client:
        found = client.agent.GetSnapshot(request).snapshot
    if not session.output.human:
        session.output.write_data(to_dict(found))
        return
    session.output.write_list(found.gpus, monitor.gpus(None))
    if found.gpu_problem:
        note(f"{found.node}: {found.gpu_problem}")
