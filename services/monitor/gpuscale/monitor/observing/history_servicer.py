"""HistoryService on the wire."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from math import inf, nextafter

from gpuscale.api.monitor import v1 as api
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.runtime.tasks import Clock
from gpuscale.common.security.auth import Context
from gpuscale.common.wire import optional_seconds, seconds, to_duration
from gpuscale.monitor.fleet.nodes import Directory
from gpuscale.monitor.history.history import History, metrics_of, plan, spread, trend
from gpuscale.monitor.history.ring import Point
from gpuscale.monitor.model.metrics import Metric
from gpuscale.monitor.observing.samples import Dates, to_stats

DEFAULT_SPAN_SECONDS = 600.0
MOST_POINTS = 30_000
"""Maximum number of points in one answer; each takes about 60 bytes."""


_Span = tuple[float, float]
"""Start and end on the clock."""


class HistoryServicer(api.HistoryServiceServicer):
    """Answers from the history; other tasks run between metrics."""

    def __init__(self, history: History, directory: Directory, clock: Clock) -> None:
        self._history = history
        self._directory = directory
        self._clock = clock

    async def QueryHistory(
        self, request: api.QueryHistoryRequest, context: Context
    ) -> api.QueryHistoryResponse:
        dates = Dates.of(self._clock)
        start, end = span = _span(request, dates)
        subjects = self._directory.subjects(request.names, request.uuids)
        count = sum(len(_metrics(_key(*one), request.metrics)) for one in subjects.items())
        most = MOST_POINTS // max(count, 1)
        step = optional_seconds(request, "step") or 0.0
        planned = plan(self._history.kept, end - start, dates.now - start, step, most)
        response = api.QueryHistoryResponse(step=to_duration(planned.step))
        self._describe(response, subjects, span, dates)
        async for name, metric, points in self._points(subjects, request.metrics, planned.tier, span):
            response.series.add(
                name=name,
                uuid=subjects[name],
                metric=api.Metric.Value(f"METRIC_{metric.name}"),
                points=[
                    api.HistoryPoint(
                        start_time=dates.timestamp(point.start),
                        min=point.min,
                        max=point.max,
                        mean=point.mean,
                        sample_count=point.samples,
                    )
                    for point in spread(points, planned.step)
                ],
            )
        return response

    async def QueryTrends(self, request: api.QueryTrendsRequest, context: Context) -> api.QueryTrendsResponse:
        dates = Dates.of(self._clock)
        start, end = span = _span(request, dates)
        subjects = self._directory.subjects(request.names, request.uuids)
        planned = plan(self._history.kept, end - start, dates.now - start, 0.0, MOST_POINTS)
        response = api.QueryTrendsResponse()
        self._describe(response, subjects, span, dates)
        async for name, metric, points in self._points(subjects, request.metrics, planned.tier, span):
            found = trend(points)
            if found is not None:
                response.trends.add(
                    name=name,
                    uuid=subjects[name],
                    stats=to_stats(metric, found.stats),
                    slope_per_hour=found.slope_per_hour,
                )
        return response

    def _describe(
        self,
        response: api.QueryHistoryResponse | api.QueryTrendsResponse,
        subjects: Mapping[str, str],
        span: _Span,
        dates: Dates,
    ) -> None:
        """Set the span, the oldest time that is kept, and the subjects without history."""
        response.start_time.CopyFrom(dates.timestamp(span[0]))
        response.end_time.CopyFrom(dates.timestamp(span[1]))
        kept = {name: self._history.get(_key(name, uuid)) for name, uuid in subjects.items()}
        response.not_kept.extend(name for name, series in kept.items() if series is None)
        begins = [series.oldest() for series in kept.values() if series is not None]
        oldest = min((begin for begin in begins if begin is not None), default=None)
        if oldest is not None:
            response.oldest_time.CopyFrom(dates.timestamp(oldest))

    async def _points(
        self, subjects: Mapping[str, str], wanted: Sequence[int], tier: int, span: _Span
    ) -> AsyncGenerator[tuple[str, Metric, list[Point]], None]:
        """The points of each metric of each subject, if any."""
        for name, uuid in subjects.items():
            key = _key(name, uuid)
            series = self._history.get(key)
            if series is None:
                continue
            for metric in _metrics(key, wanted):
                points = series.points(metrics_of(key).index(metric), tier, *span)
                if points:
                    yield name, metric, points
                await asyncio.sleep(0)


def _key(name: str, uuid: str) -> str:
    """The key of the series of a node or GPU."""
    return uuid.lower() or name


def _metrics(key: str, wanted: Sequence[int]) -> list[Metric]:
    """The wanted metrics of a node or GPU; all if none is named."""
    return [metric for metric in metrics_of(key) if not wanted or metric.value in wanted]


def _span(request: api.QueryHistoryRequest | api.QueryTrendsRequest, dates: Dates) -> _Span:
    span = request.span
    now = nextafter(dates.now, inf)  # the end is exclusive, but the newest sample counts
    if span.HasField("last"):
        if span.HasField("start_time") or span.HasField("end_time"):
            raise InvalidArgumentError("last excludes start_time and end_time", field="span.last")
        return dates.now - seconds(span.last), now
    if not span.HasField("start_time"):
        if span.HasField("end_time"):
            raise InvalidArgumentError("end_time needs start_time", field="span.start_time")
        return dates.now - DEFAULT_SPAN_SECONDS, now
    start = dates.seconds(span.start_time)
    end = dates.seconds(span.end_time) if span.HasField("end_time") else now
    if end <= start:
        raise InvalidArgumentError("end_time must be after start_time", field="span.end_time")
    return start, end
