"""`gpuscalectl get recordings`, `get health` and `history`: what the fleet keeps of what was."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from gpuscale.cli.console.session import note, session_of
from gpuscale.cli.grammar.options import Names, duration
from gpuscale.common.errors import InvalidArgumentError, NotFoundError

if TYPE_CHECKING:
    from gpuscale.api.monitor import v1 as monitor_api
    from gpuscale.client import Client

KINDS = {
    "gpu": "gpu",
    "gpus": "gpu",
    "node": "node",
    "nodes": "node",
    "endpoint": "endpoint",
    "endpoints": "endpoint",
}
"""What `history` may be asked of by kind."""

Last = Annotated[
    float,
    typer.Option(
        "--since", "--last", parser=duration, metavar="DURATION", help="How far back, such as 10m, 6h or 7d."
    ),
]
Metrics = Annotated[
    list[str] | None,
    typer.Option("--metric", metavar="NAME", help="Only this one, such as power_watts; may be repeated."),
]


def recordings(context: typer.Context, name: Names = None) -> None:
    """Recordings of GPUs: how many samples, over which time. One alone with its figures, as `record` prints them."""
    from gpuscale.cli.commands.recorded import write
    from gpuscale.cli.views.observed import RECORDINGS

    session, output = session_of(context), session_of(context).output
    with session.connect() as client:
        found = _recordings(client, name or ())
    if name and len(name) == 1:
        if output.human:
            output.write_one(found[0], RECORDINGS)
        write(session, found[0])
        return
    output.write_list(found, RECORDINGS)
    output.note_none(found)


def _recordings(client: "Client", typed: Sequence[str]) -> "list[monitor_api.Recording]":
    from gpuscale.api.monitor import v1 as api
    from gpuscale.cli.commands.recorded import RECORDING
    from gpuscale.cli.console.resources import full_name
    from gpuscale.client import pages

    if typed:
        wanted = [api.GetRecordingRequest(name=full_name(RECORDING, name)) for name in typed]
        return [client.recordings.GetRecording(request).recording for request in wanted]
    found = pages(client.recordings.ListRecordings, api.ListRecordingsRequest())
    return [recording for page in found for recording in page.recordings]


def health(
    context: typer.Context,
    node: Annotated[str, typer.Option(metavar="NAME", help="Only this node and its GPUs.")] = "",
    ended: Annotated[bool, typer.Option("--all", "-a", help="Those that are over, too.")] = False,
) -> None:
    """What is wrong with nodes and GPUs, newest first, and what to do about it."""
    from gpuscale.api.monitor import v1 as api
    from gpuscale.cli.console.resources import full_name
    from gpuscale.cli.views.observed import HEALTH
    from gpuscale.client import pages
    from gpuscale.common.names import NODE

    session = session_of(context)
    request = api.ListHealthEventsRequest(parent=full_name(NODE, node) if node else "", show_resolved=ended)
    with session.connect() as client:
        listed = pages(client.health.ListHealthEvents, request)
        found = [event for page in listed for event in page.health_events]
    session.output.write_list(found, HEALTH)
    session.output.note_none(found, "nothing is wrong")


def history(
    context: typer.Context,
    name: Annotated[list[str], typer.Argument(metavar="[gpu|node|endpoint] NAME...", show_default=False)],
    last: Last = 600.0,
    step: Annotated[
        float | None, typer.Option(parser=duration, metavar="DURATION", help="Time from point to point.")
    ] = None,
    metric: Metrics = None,
    points: Annotated[bool, typer.Option("--points", help="Every point, not the trend.")] = False,
) -> None:
    """What nodes and GPUs did: minimum, mean, maximum and trend of each metric, or every point.

    A name is that of a node, NODE/UUID, or the UUID alone; of an endpoint the GPUs that its replicas have now are shown.
    """
    from gpuscale.api.monitor import v1 as api
    from gpuscale.cli.views.observed import SERIES, TRENDS
    from gpuscale.common.wire import to_duration

    session = session_of(context)
    span = api.HistorySpan(last=to_duration(last))
    metrics = [_metric(one) for one in metric or ()]
    with session.connect() as client:
        names, uuids = _subjects(client, name)
        if not points:
            asked = api.QueryTrendsRequest(names=names, uuids=uuids, metrics=metrics, span=span)
            trends = client.history.QueryTrends(asked)
            session.output.write_list(trends.trends, TRENDS)
            _note_not_kept(trends.not_kept)
            return
        request = api.QueryHistoryRequest(names=names, uuids=uuids, metrics=metrics, span=span)
        if step is not None:
            request.step.CopyFrom(to_duration(step))
        answer = client.history.QueryHistory(request)
    if session.output.human:
        session.output.write_list([one for series in answer.series for one in _single(series)], SERIES)
    else:
        session.output.write_list(answer.series, SERIES)
    _note_not_kept(answer.not_kept)


def _note_not_kept(missing: "Sequence[str]") -> None:
    for name in missing:
        note(
            f"no history is kept of {name}: nothing was read yet, or --history-memory-mib of the fleet is used up"
        )


def _subjects(client: "Client", typed: Sequence[str]) -> tuple[list[str], list[str]]:
    """(resource names, UUIDs) of what was typed, perhaps after its kind.

    Raises:
        InvalidArgumentError: a name is not one of that kind.
        NotFoundError: no replica of an endpoint has a GPU.
    """
    kind = KINDS.get(typed[0]) if len(typed) > 1 else None
    if kind == "endpoint":
        return [], _gpus_of(client, typed[1:])
    from gpuscale.cli.console.resources import named

    names, uuids = named(client, typed if kind is None else typed[1:])
    if (kind == "node" and (uuids or any("/gpus/" in name for name in names))) or (
        kind == "gpu" and any("/gpus/" not in name for name in names)
    ):
        raise InvalidArgumentError(f"{' '.join(typed[1:])} is no {kind}")
    return names, uuids


def _gpus_of(client: "Client", endpoints: Sequence[str]) -> list[str]:
    """UUIDs of the GPUs that replicas of endpoints have, each once."""
    from gpuscale.cli.console import resources

    found: dict[str, None] = {}
    for endpoint in endpoints:
        uuids = [uuid for one in resources.replicas(client, endpoint=endpoint) for uuid in one.gpu_uuids]
        if not uuids:
            raise NotFoundError(f"no replica of {endpoint} has a GPU now")
        found |= dict.fromkeys(uuids)
    return list(found)


def _metric(typed: str) -> "monitor_api.Metric.ValueType":
    """The metric of a name in any case; its unit may be left out where the rest says it."""
    from gpuscale.api.monitor import v1 as api

    known = {key.removeprefix("METRIC_").lower(): value for key, value in api.Metric.items() if value}
    wanted = typed.lower()
    alike = [key for key in known if key == wanted or key.rpartition("_")[0] == wanted]
    found = known[alike[0]] if len(alike) == 1 else known.get(wanted)
    if found is None:
        raise InvalidArgumentError(f"{typed!r} is no metric; there are {', '.join(known)}")
    return found


def _single(series: "monitor_api.HistorySeries") -> "list[monitor_api.HistorySeries]":
    """A series of one point for each of its points: the rows of a table."""
    from gpuscale.api.monitor import v1 as api

    return [
        api.HistorySeries(name=series.name, uuid=series.uuid, metric=series.metric, points=[point])
        for point in series.points
    ]
