"""`gpuscalectl history`: what nodes and GPUs did."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpuscale.cli.console.command import command, names
from gpuscale.cli.console.session import Session
from gpuscale.cli.console.terminal import note
from gpuscale.cli.grammar.parameters import DURATION, option, repeated
from gpuscale.common.errors import InvalidArgumentError, NotFoundError

if TYPE_CHECKING:
    from gpuscale.api.monitor import v1 as monitor_api
    from gpuscale.client import Client


@command("history node host-1")
@names("nodes", metavar="[gpu|node|endpoint] NAME")
@option("--since", "--last", "last", type=DURATION, default="10m", help="How far back, such as 6h or 7d.")
@option("--step", type=DURATION, help="Time between points.")
@repeated("--metric", metavar="NAME", help="Only this metric, such as power_watts.")
@option("--points", is_flag=True, help="Every point instead of the trend.")
def history(
    session: Session,
    name: tuple[str, ...],
    last: float,
    step: float | None,
    metric: tuple[str, ...],
    points: bool,
) -> None:
    """What nodes and GPUs did: minimum, mean, maximum and trend of each metric, or every point.

    NAME is that of a node, NODE/UUID, or the UUID alone; for an endpoint the GPUs of its present replicas are shown.
    """
    from gpuscale.api.monitor import v1 as api
    from gpuscale.cli.views.monitor import SERIES, TRENDS
    from gpuscale.common.wire import to_duration

    span = api.HistorySpan(last=to_duration(last))
    metrics = list(map(_metric, metric))
    with session.connect() as client:
        names, uuids = _subjects(client, name)
        if not points:
            asked = api.QueryTrendsRequest(names=names, uuids=uuids, metrics=metrics, span=span)
            trends = client.history.QueryTrends(asked)
            session.output.write_list(trends.trends, TRENDS)
            _note_not_kept(trends.not_kept)
            return
        request = api.QueryHistoryRequest(
            names=names,
            uuids=uuids,
            metrics=metrics,
            span=span,
            step=None if step is None else to_duration(step),
        )
        answer = client.history.QueryHistory(request)
    rows = (
        [one for series in answer.series for one in _single(series)]
        if session.output.human
        else answer.series
    )
    session.output.write_list(rows, SERIES)
    _note_not_kept(answer.not_kept)


def _note_not_kept(missing: "Sequence[str]") -> None:
    for name in missing:
        note(f"no history of {name}: nothing was read yet, or the fleet has used up --history-memory-mib")


def _subjects(client: "Client", typed: Sequence[str]) -> tuple[list[str], list[str]]:
    """(resource names, UUIDs) of what was typed, perhaps after its noun.

    Raises:
        InvalidArgumentError: a name is not one of that kind.
        NotFoundError: no replica of an endpoint has a GPU.
    """
    from gpuscale.cli.console import resources

    noun, rest = resources.without_noun(typed, "gpus", "nodes", "endpoints")
    if noun == "endpoints":
        return [], _gpus_of(client, rest)
    names, uuids = resources.named(client, rest)
    of_gpus = [*uuids, *(name for name in names if "/gpus/" in name)]
    if (noun == "nodes" and of_gpus) or (noun == "gpus" and len(of_gpus) < len(rest)):
        raise InvalidArgumentError(f"{' '.join(rest)} is not a {noun.removesuffix('s')}")
    return names, uuids


def _gpus_of(client: "Client", endpoints: Sequence[str]) -> list[str]:
    """UUIDs of the GPUs of the replicas of endpoints."""
    from gpuscale.cli.console import resources

    found: dict[str, None] = {}
    for endpoint in endpoints:
        uuids = [uuid for one in resources.replicas(client, endpoint=endpoint) for uuid in one.gpu_uuids]
        if not uuids:
            raise NotFoundError(f"no replica of {endpoint} has a GPU now")
        found |= dict.fromkeys(uuids)
    return list(found)


def _metric(typed: str) -> "monitor_api.Metric.ValueType":
    """The metric of a name in any case; an unambiguous one may lack its unit."""
    from gpuscale.api.monitor import v1 as api

    known = {key.removeprefix("METRIC_").lower(): value for key, value in api.Metric.items() if value}
    wanted = typed.lower()
    alike = [key for key in known if key == wanted or key.rpartition("_")[0] == wanted]
    found = known[alike[0]] if len(alike) == 1 else known.get(wanted)
    if found is None:
        raise InvalidArgumentError(f"{typed!r} is not a metric; choose from {', '.join(known)}")
    return found


def _single(series: "monitor_api.HistorySeries") -> "list[monitor_api.HistorySeries]":
    """The rows of a table: a series for each point."""
    from gpuscale.api.monitor import v1 as api

    return [
        api.HistorySeries(name=series.name, uuid=series.uuid, metric=series.metric, points=[point])
        for point in series.points
    ]
