"""`gpuscalectl history`, `record`, and `start`, `stop` and `delete recording`: past readings of nodes and GPUs."""

import os
import uuid
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import click

from gpuscale.api.monitor import v1 as api
from gpuscale.cli.commands.processes import STDERR, Forwarding, start
from gpuscale.cli.commands.usage import Statistics
from gpuscale.cli.console import lookup
from gpuscale.cli.console.bulk import delete_each
from gpuscale.cli.console.command import Session, command, names, names_of, one_name
from gpuscale.cli.console.errors import leave
from gpuscale.cli.console.terminal import note, terminal_width, write_lines
from gpuscale.cli.grammar import parameters
from gpuscale.cli.grammar.jsonpath import Format
from gpuscale.cli.grammar.nouns import full_name, is_uuid, without_noun
from gpuscale.cli.views import monitor as views
from gpuscale.client.over_ssh import exit_code
from gpuscale.common import wire
from gpuscale.common.errors import GpuscaleError, InvalidArgumentError, NotFoundError
from gpuscale.common.names import RECORDING, node_name

if TYPE_CHECKING:
    from gpuscale.api.allocator.v1 import Reservation
    from gpuscale.client import Client

    Recorded = Callable[[Reservation], AbstractContextManager[object]]

LONGEST_SECONDS = 604_800.0
"""A recording ends by itself after 7 d."""


@dataclass(frozen=True)
class RecordingOptions:
    """The GPUs to record, as typed."""

    gpu: tuple[str, ...] = parameters.shared(
        many=True, metavar="UUID", help="This GPU.", shell_complete=names_of("gpus")
    )
    node: tuple[str, ...] = parameters.shared(
        many=True, metavar="NAME", help="All GPUs of this node.", shell_complete=names_of("nodes")
    )
    reservation: str = parameters.shared(
        default="",
        metavar="NAME",
        help="The GPUs of this reservation.",
        shell_complete=names_of("reservations"),
    )
    interval: float | None = parameters.shared(
        type=parameters.DURATION, help="Time between samples; 1s by default."
    )

    def targets(self, client: "Client") -> tuple[list[str], list[str]]:
        """Resource names and UUIDs to record: by default those in CUDA_VISIBLE_DEVICES, or this node.

        Raises InvalidArgumentError: nothing was named, and this host is not a node.
        """
        names, uuids = lookup.named(client, self.gpu, "gpus")
        names += lookup.named(client, self.node, "nodes")[0]
        if self.reservation:
            [found] = lookup.reservations(client, [self.reservation])
            uuids += [one.uuid for one in found.gpus if one.uuid not in uuids]
        if names or uuids:
            return names, uuids
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        uuids = [one for one in visible if is_uuid(one)]
        if uuids:
            return [], uuids
        here = client.this_node()
        if here is not None:
            return [node_name(here)], []
        nodes = lookup.nodes(client)
        if len(nodes) != 1:
            raise InvalidArgumentError(
                f"this host is not one of the {len(nodes)} nodes; pass --node, --gpu or --reservation"
            )
        return [nodes[0].name], []


@command("record -- python train.py", context_settings={"allow_interspersed_args": False})
@parameters.takes("wanted", RecordingOptions)
@click.argument("command", nargs=-1, required=True, metavar="-- COMMAND...")
def record(session: Session, wanted: RecordingOptions, command: tuple[str, ...]) -> None:
    """Run a command, then print GPU readings while it ran: minimum, mean, maximum and number of samples.

    By default it records the GPUs whose UUIDs are in CUDA_VISIBLE_DEVICES, or else those of
    this host. The exit code is the command's. With -o json or yaml, the standard output of the command goes to standard error.
    """
    with session.connect() as client:
        recording = begin(client, *wanted.targets(client), interval=wanted.interval).name
        try:
            with Forwarding() as signals:
                process = start(command, stdout=None if session.output.human else STDERR)
                if isinstance(process, int):
                    code = process
                else:
                    signals.to(process)
                    code = exit_code(process.wait())
        finally:
            for one in _stopped(client, recording):
                write(session, [one])
    leave(code)


def begin(
    client: "Client",
    names: Sequence[str],
    uuids: Sequence[str],
    *,
    interval: float | None = None,
    longest: float = LONGEST_SECONDS,
    key: str = "",
) -> "api.Recording":
    """Start a recording."""
    request = api.StartRecordingRequest(
        request_id=str(uuid.uuid4()),
        recording_id=key,
        names=names,
        uuids=uuids,
        interval=None if interval is None else wire.to_duration(interval),
        max_duration=wire.to_duration(longest),
    )
    return client.recordings.StartRecording(request).recording


def _stopped(client: "Client", name: str) -> "list[api.Recording]":
    """Stop the recording of a command; a failure does not change the command's exit code."""
    try:
        return [client.recordings.StopRecording(api.StopRecordingRequest(name=name)).recording]
    except GpuscaleError as error:
        note(f"{name} is lost: {error.message}")
        return []


@contextmanager
def recording_attempts(session: Session, client: "Client", held_by: str) -> "Generator[Recorded]":
    """Yields what records the GPUs of one attempt of a job. The end prints all recordings, with the statistics of the reservation."""
    found: list[api.Recording] = []

    @contextmanager
    def recorded(held: "Reservation") -> Generator[None]:
        try:
            name = begin(client, [], [gpu.uuid for gpu in held.gpus]).name
        except GpuscaleError as error:  # which does not stop the job
            note(f"cannot record: {error.message}")
            yield
            return
        try:
            yield
        finally:
            found.extend(_stopped(client, name))

    try:
        yield recorded
    finally:
        try:
            if found:
                write(session, found, Statistics.of(client, held_by))
        except GpuscaleError as error:
            note(f"{found[-1].name} is lost: {error.message}")


def write(session: Session, found: "Sequence[api.Recording]", statistics: Statistics | None = None) -> None:
    """Print the recordings of all attempts of a job, or one: a table of the GPUs, or data in the established structure.

    Data is of the last attempt, with those before it, and includes the `statistics` of the reservation that held the GPUs.
    """
    from gpuscale.client.recording_view import seed_view

    if session.output.human:
        session.output.write_list([gpu for one in found for gpu in one.gpus], views.RECORDED_GPUS)
        write_lines(statistics.lines() if statistics else [])
    elif session.output.format is Format.NAME:
        session.output.write_list(found, views.RECORDINGS)
    else:
        *before, last = map(seed_view, found)
        earlier = {"earlier_attempts": before} if before else {}
        of_hold = {"reservation": statistics.data()} if statistics else {}
        session.output.write_data(last | earlier | of_hold)


@command("start recording")
@one_name(required=False)
@parameters.takes("wanted", RecordingOptions)
@parameters.option(
    "--for", "limit", type=parameters.DURATION, default="7d", help="Stop by itself after this time."
)
def start_recording(session: Session, wanted: RecordingOptions, name: str, limit: float) -> None:
    """Record GPUs until `stop recording`.

    By default it records the GPUs whose UUIDs are in CUDA_VISIBLE_DEVICES, or else those of
    this host.
    """
    key = name.removeprefix("recordings/")
    with session.connect() as client:
        names, uuids = wanted.targets(client)
        recording = begin(client, names, uuids, interval=wanted.interval, longest=limit, key=key)
    session.output.write_one(recording, views.RECORDINGS)


@command("stop recording rec-1")
@one_name("recordings")
def stop_recording(session: Session, name: str) -> None:
    """Stop a recording and print its figures; does nothing more if it has ended."""
    full = full_name(RECORDING, name)
    with session.connect() as client:
        recording = client.recordings.StopRecording(api.StopRecordingRequest(name=full)).recording
    write(session, [recording])


@command("delete recording rec-1")
@names("recordings")
@parameters.YES
def delete_recording(session: Session, name: tuple[str, ...], yes: bool) -> None:
    """Delete recordings; a running one stops."""
    delete_each(session, "recordings", RECORDING, name, api.DeleteRecordingRequest, yes=yes)


@command("history node host-1")
@names("nodes", metavar="[gpu|node|endpoint] NAME")
@parameters.takes("when", parameters.When)
@parameters.option("--step", type=parameters.DURATION, help="Time between points.")
@parameters.repeated("--metric", metavar="NAME", help="Only this metric, such as power_watts.")
@parameters.option("--points", is_flag=True, help="Show every point instead of the trend.")
@parameters.option("--chart", is_flag=True, help="Show a chart of each metric instead of the trend.")
def history(
    session: Session,
    name: tuple[str, ...],
    when: parameters.When,
    step: float | None,
    metric: tuple[str, ...],
    points: bool,
    chart: bool,
) -> None:
    """Show past readings of nodes and GPUs: minimum, mean, maximum and trend of each metric, every point, or a chart.

    NAME is a node, a GPU as NODE/INDEX, UUID or the beginning of one, or an endpoint for the GPUs of its current replicas. Shows
    the last 10 minutes by default; --at shows 5 minutes before and after that time. To see who used a GPU: get reservations --gpu.
    """
    time = when.range(timedelta(minutes=10), parameters.AROUND)
    if time.since is None:
        raise click.UsageError("--until needs --since")
    span = api.HistorySpan(
        start_time=wire.optional_timestamp(time.since), end_time=wire.optional_timestamp(time.until)
    )
    begin = when.since or when.at
    metrics = list(map(_metric, metric))
    width = min(100, terminal_width() or 80)
    if chart and step is None:
        until = time.until or datetime.now(UTC)
        step = max(1.0, (until - time.since).total_seconds() / (width - views.MARGIN))
    with session.connect() as client:
        names, uuids = _subjects(client, name)
        if not (points or chart):
            asked = api.QueryTrendsRequest(names=names, uuids=uuids, metrics=metrics, span=span)
            trends = client.history.QueryTrends(asked)
            session.output.write_list(trends.trends, views.TRENDS)
            _note_not_kept(trends, begin)
            return
        request = api.QueryHistoryRequest(
            names=names,
            uuids=uuids,
            metrics=metrics,
            span=span,
            step=None if step is None else wire.to_duration(step),
        )
        answer = client.history.QueryHistory(request)
    rows = list(answer.series)
    if chart and session.output.human:
        write_lines(list(views.drawn(answer, width)))
    elif session.output.human:  # a row for each point
        rows = [
            api.HistorySeries(name=one.name, uuid=one.uuid, metric=one.metric, points=[point])
            for one in answer.series
            for point in one.points
        ]
    if not (chart and session.output.human):
        session.output.write_list(rows, views.SERIES)
        session.output.note_none(rows, "none: they have no such readings of this time")
    _note_not_kept(answer, begin)


def _note_not_kept(
    answer: "api.QueryHistoryResponse | api.QueryTrendsResponse", begin: datetime | None
) -> None:
    if begin and answer.HasField("oldest_time") and (oldest := wire.to_datetime(answer.oldest_time)) > begin:
        note(f"nothing is kept from before {parameters.local_text(oldest)}")
    for name in answer.not_kept:
        note(f"no history of {name}: no readings yet, or the fleet's --history-memory-mib is full")


def _subjects(client: "Client", typed: Sequence[str]) -> tuple[list[str], list[str]]:
    """Resource names and UUIDs of what was typed, with or without a noun; for endpoints, the GPUs of their replicas."""
    noun, rest = without_noun(typed, "gpus", "nodes", "endpoints")
    if noun == "endpoints":
        found: dict[str, None] = {}
        for endpoint in rest:
            held = [uuid for one in lookup.replicas(client, endpoint=endpoint) for uuid in one.gpu_uuids]
            if not held:
                raise NotFoundError(f"no replica of {endpoint} has a GPU now")
            found |= dict.fromkeys(held)
        return [], list(found)
    names, uuids = lookup.named(client, rest)
    of_gpus = [*uuids, *(name for name in names if "/gpus/" in name)]
    if (noun == "nodes" and of_gpus) or (noun == "gpus" and len(of_gpus) < len(rest)):
        raise InvalidArgumentError(f"{' '.join(rest)} is not a {noun.removesuffix('s')}")
    return names, uuids


def _metric(typed: str) -> "api.Metric.ValueType":
    """The metric of a name, in any case; the unit may be left out if unambiguous."""
    known = {key.removeprefix("METRIC_").lower(): value for key, value in api.Metric.items() if value}
    wanted = typed.lower()
    alike = [key for key in known if key == wanted or key.rpartition("_")[0] == wanted]
    found = known[alike[0]] if len(alike) == 1 else known.get(wanted)
    if found is None:
        raise InvalidArgumentError(f"{typed!r} is not a metric; choose from {', '.join(known)}")
    return found
