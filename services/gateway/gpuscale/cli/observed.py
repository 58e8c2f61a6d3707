"""`gpuscalectl get recordings`, `get health` and `history`: what the fleet keeps of what was."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from gpuscale.cli.options import Names, duration
from gpuscale.cli.session import note, session_of
from gpuscale.common.errors import InvalidArgumentError

if TYPE_CHECKING:
    from gpuscale.api.monitor import v1 as monitor_api
    from gpuscale.client import Client

RECORDING = "recordings/{recording}"
_UUID = r"[A-Za-z]+-[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"

Last = Annotated[
    float,
    typer.Option("--last", parser=duration, metavar="DURATION", help="How far back, such as 10m, 6h or 7d."),
]
Metrics = Annotated[
    list[str] | None,
    typer.Option("--metric", metavar="NAME", help="Only this one, such as power_watts; may be repeated."),
]


def recordings(context: typer.Context, name: Names = None) -> None:
    """Recordings of GPUs: how many samples, over which time."""
    from gpuscale.cli.views.observed import RECORDED_GPUS, RECORDINGS

    output = session_of(context).output
    with session_of(context).connect() as client:
        found = _recordings(client, name or ())
    if name and len(name) == 1:
        output.write_one(found[0], RECORDINGS)
        if output.human:
            output.write_list(found[0].gpus, RECORDED_GPUS)
        return
    output.write_list(found, RECORDINGS)
    if not found and output.human:
        note("none")


def _recordings(client: "Client", typed: Sequence[str]) -> "list[monitor_api.Recording]":
    from gpuscale.api.monitor import v1 as api
    from gpuscale.cli.resources import full_name
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
    from gpuscale.cli.resources import full_name
    from gpuscale.cli.views.observed import HEALTH
    from gpuscale.client import pages
    from gpuscale.common.names import NODE

    session = session_of(context)
    request = api.ListHealthEventsRequest(parent=full_name(NODE, node) if node else "", show_resolved=ended)
    with session.connect() as client:
        listed = pages(client.health.ListHealthEvents, request)
        found = [event for page in listed for event in page.health_events]
    session.output.write_list(found, HEALTH)
    if not found and session.output.human:
        note("nothing is wrong")


def history(
    context: typer.Context,
    name: Annotated[list[str], typer.Argument(metavar="NODE|GPU...", show_default=False)],
    last: Last = 600.0,
    step: Annotated[
        float | None, typer.Option(parser=duration, metavar="DURATION", help="Time from point to point.")
    ] = None,
    metric: Metrics = None,
    points: Annotated[bool, typer.Option("--points", help="Every point, not the trend.")] = False,
) -> None:
    """What nodes and GPUs did: minimum, mean, maximum and trend of each metric, or every point."""
    from gpuscale.api.monitor import v1 as api
    from gpuscale.cli.views.observed import SERIES, TRENDS
    from gpuscale.common.wire import to_duration

    session = session_of(context)
    names, uuids = named(name)
    span = api.HistorySpan(last=to_duration(last))
    metrics = [_metric(one) for one in metric or ()]
    with session.connect() as client:
        if not points:
            asked = api.QueryTrendsRequest(names=names, uuids=uuids, metrics=metrics, span=span)
            session.output.write_list(client.history.QueryTrends(asked).trends, TRENDS)
            return
        request = api.QueryHistoryRequest(names=names, uuids=uuids, metrics=metrics, span=span)
        if step is not None:
            request.step.CopyFrom(to_duration(step))
        answer = client.history.QueryHistory(request)
    if session.output.human:
        session.output.write_list([one for series in answer.series for one in _single(series)], SERIES)
    else:
        session.output.write_list(answer.series, SERIES)
    for missing in answer.not_kept:
        note(f"no history is kept of {missing}")


def is_uuid(typed: str) -> bool:
    """Whether a text looks like the UUID of a GPU, such as GPU-6afcb721-67c0-5d87-a657-b17ffccbb12a."""
    return re.fullmatch(_UUID, typed) is not None


def named(typed: Sequence[str]) -> tuple[list[str], list[str]]:
    """(resource names, UUIDs) of nodes and GPUs: `host-1`, `host-1/gpu-…`, or a UUID alone."""
    from gpuscale.cli.resources import full_name
    from gpuscale.common.names import GPU, NODE, match

    uuids = [one for one in typed if is_uuid(one)]
    others = [one for one in typed if one not in uuids]
    names = [
        one
        if match(NODE, one)
        else full_name(GPU if "/" in one else NODE, one.lower() if "/" in one else one)
        for one in others
    ]
    return names, uuids


def _metric(typed: str) -> "monitor_api.Metric.ValueType":
    """The metric of a name in any case."""
    from gpuscale.api.monitor import v1 as api

    known = {key.removeprefix("METRIC_").lower(): value for key, value in api.Metric.items() if value}
    found = known.get(typed.lower())
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
