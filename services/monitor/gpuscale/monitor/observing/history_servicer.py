"""HistoryService on the wire."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from math import inf, nextafter

from gpuscale.api.monitor import v1 as api
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.runtime.tasks import Clock
from gpuscale.common.security.auth import Context
from gpuscale.common.wire import optional_seconds, seconds, to_duration
from gpuscale.monitor.fleet.nodes import Directory, Subject
from gpuscale.monitor.history.history import History, plan, spread, trend
from gpuscale.monitor.history.ring import Point
from gpuscale.monitor.model.metrics import GPU_METRICS, NODE_METRICS, Metric
from gpuscale.monitor.wire.values import Dates, to_stats

DEFAULT_SPAN_SECONDS = 600.0
MOST_POINTS = 30_000
"""Most points in one answer, of all series together; each takes about 60 bytes."""


@dataclass(frozen=True, slots=True)
class _Span:
    """From when until when, in seconds of the clock."""

    start: float
    end: float


class HistoryServicer(api.HistoryServiceServicer):
    """Answers from what is kept. Other tasks run between two metrics: an answer may take a while."""

    def __init__(self, history: History, directory: Directory, clock: Clock) -> None:
        self._history = history
        self._directory = directory
        self._clock = clock

    async def QueryHistory(
        self, request: api.QueryHistoryRequest, context: Context
    ) -> api.QueryHistoryResponse:
        dates = Dates.of(self._clock)
        span = _span(request, dates)
        subjects = self._directory.subjects(request.names, request.uuids)
        count = sum(len(_metrics(subject, request.metrics)) for subject in subjects)
        most = MOST_POINTS // max(count, 1)
        step = optional_seconds(request, "step") or 0.0
        planned = plan(self._history.kept, span.end - span.start, dates.now - span.start, step, most)
        response = api.QueryHistoryResponse(
            step=to_duration(planned.step),
            start_time=dates.timestamp(span.start),
            end_time=dates.timestamp(span.end),
            not_kept=self._not_kept(subjects),
        )
        self._tell_oldest(response, subjects, dates)
        async for subject, metric, points in self._points(subjects, request.metrics, planned.tier, span):
            response.series.add(
                name=subject.name,
                uuid=subject.uuid,
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
        span = _span(request, dates)
        subjects = self._directory.subjects(request.names, request.uuids)
        planned = plan(self._history.kept, span.end - span.start, dates.now - span.start, 0.0, MOST_POINTS)
        response = api.QueryTrendsResponse(
            start_time=dates.timestamp(span.start),
            end_time=dates.timestamp(span.end),
            not_kept=self._not_kept(subjects),
        )
        self._tell_oldest(response, subjects, dates)
        async for subject, metric, points in self._points(subjects, request.metrics, planned.tier, span):
            found = trend(points)
            if found is not None:
                response.trends.add(
                    name=subject.name,
                    uuid=subject.uuid,
                    stats=to_stats(metric, found.stats),
                    slope_per_hour=found.slope_per_hour,
                )
        return response

    def _tell_oldest(
        self,
        response: api.QueryHistoryResponse | api.QueryTrendsResponse,
        subjects: Sequence[Subject],
        dates: Dates,
    ) -> None:
        kept = [self._history.get(subject.key) for subject in subjects]
        begins = [series.oldest() for series in kept if series is not None]
        oldest = min((begin for begin in begins if begin is not None), default=None)
        if oldest is not None:
            response.oldest_time.CopyFrom(dates.timestamp(oldest))

    def _not_kept(self, subjects: Sequence[Subject]) -> list[str]:
        return [subject.name for subject in subjects if self._history.get(subject.key) is None]

    async def _points(
        self, subjects: Sequence[Subject], wanted: Sequence[int], tier: int, span: _Span
    ) -> AsyncGenerator[tuple[Subject, Metric, list[Point]], None]:
        """Each metric of each subject that has a point."""
        for subject in subjects:
            series = self._history.get(subject.key)
            if series is None:
                continue
            for metric in _metrics(subject, wanted):
                place = (GPU_METRICS if subject.uuid else NODE_METRICS).index(metric)
                points = series.points(place, tier, span.start, span.end)
                if points:
                    yield subject, metric, points
                await asyncio.sleep(0)


def _metrics(subject: Subject, wanted: Sequence[int]) -> list[Metric]:
    """The metrics of a node or GPU, or those of them that are wanted."""
    all_of_them = GPU_METRICS if subject.uuid else NODE_METRICS
    return [metric for metric in all_of_them if not wanted or metric.value in wanted]


def _span(request: api.QueryHistoryRequest | api.QueryTrendsRequest, dates: Dates) -> _Span:
    """The span that a request names."""
    span = request.span
    now = nextafter(dates.now, inf)  # a span ends before its end, and the newest sample counts
    if span.HasField("last"):
        if span.HasField("start_time") or span.HasField("end_time"):
            raise InvalidArgumentError("last stands instead of start_time and end_time", field="span.last")
        return _Span(dates.now - seconds(span.last), now)
    if not span.HasField("start_time"):
        if span.HasField("end_time"):
            raise InvalidArgumentError("start_time must be set with end_time", field="span.start_time")
        return _Span(dates.now - DEFAULT_SPAN_SECONDS, now)
    start = dates.seconds(span.start_time)
    end = dates.seconds(span.end_time) if span.HasField("end_time") else now
    if end <= start:
        raise InvalidArgumentError("end_time must be after start_time", field="span.end_time")
    return _Span(start, end)
