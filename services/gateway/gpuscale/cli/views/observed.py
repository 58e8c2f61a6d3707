"""Recordings, health events, history and trends."""

from collections.abc import Callable

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.cli.console.cells import (
    ABSENT,
    Column,
    View,
    duration,
    percent,
    short,
    since,
    size,
    text,
    word,
)
from gpuscale.common.wire import to_datetime

RECORDINGS = View[monitor_api.Recording](
    "recordings",
    (
        Column("NAME", lambda recording: short(recording.name)),
        Column("STATE", lambda recording: word(recording, "state")),
        Column("GPUS", lambda recording: str(len(recording.gpus))),
        Column("SAMPLES", lambda recording: str(recording.sample_count)),
        Column("RAN", lambda recording: duration(recording, "duration"), moving=True),
        Column("INTERVAL", lambda recording: duration(recording, "interval")),
        Column("LIMIT", lambda recording: duration(recording, "max_duration"), wide=True),
        Column("AGE", lambda recording: since(recording, "start_time"), moving=True),
    ),
)


def _figures(
    metric: "monitor_api.Metric.ValueType", show: Callable[[float], str]
) -> Callable[[monitor_api.RecordedGpu], str]:
    """`min mean max` of a metric; `-` where it was never read."""

    def cell(gpu: monitor_api.RecordedGpu) -> str:
        found = [stats for stats in gpu.stats if stats.metric == metric]
        return (
            " ".join(show(value) for value in (found[0].min, found[0].mean, found[0].max))
            if found
            else ABSENT
        )

    return cell


RECORDED_GPUS = View[monitor_api.RecordedGpu](
    "gpus",
    (
        Column("NODE", lambda gpu: short(gpu.name).partition("/")[0]),
        Column("GPU", lambda gpu: str(gpu.index)),
        Column("MODEL", lambda gpu: text(gpu.model)),
        Column("SAMPLES", lambda gpu: str(gpu.sample_count)),
        Column("UTIL min mean max", _figures(monitor_api.Metric.METRIC_UTILIZATION_PERCENT, percent)),
        Column("MEMORY min mean max", _figures(monitor_api.Metric.METRIC_MEMORY_USED_BYTES, size)),
        Column(
            "TEMP min mean max", _figures(monitor_api.Metric.METRIC_TEMPERATURE_CELSIUS, "{:.0f}C".format)
        ),
        Column("POWER min mean max", _figures(monitor_api.Metric.METRIC_POWER_WATTS, "{:.0f}W".format)),
        Column(
            "CLOCK min mean max",
            _figures(monitor_api.Metric.METRIC_SM_CLOCK_MHZ, "{:.0f}MHz".format),
            wide=True,
        ),
        Column("UUID", lambda gpu: gpu.uuid, wide=True),
    ),
)

HEALTH = View[monitor_api.HealthEvent](
    "healthEvents",
    (
        Column("SEVERITY", lambda event: word(event, "severity")),
        Column("FATAL", lambda event: "yes" if event.fatal else "no"),
        Column("CHECK", lambda event: word(event, "check")),
        Column("NODE", lambda event: event.node),
        Column("AGE", lambda event: since(event, "start_time"), moving=True),
        Column("RESOLVED", lambda event: since(event, "resolved_time"), moving=True),
        Column("COUNT", lambda event: str(event.count), wide=True),
        Column("CLEARED", lambda event: "yes" if event.cleared else "no", wide=True),
        Column("ACTION", lambda event: word(event, "recommended_action")),
        Column("MESSAGE", lambda event: text(event.message)),
        Column("UUID", lambda event: text(event.uuid)),
        Column("NAME", lambda event: short(event.name), wide=True),
    ),
)


def _point(show: Callable[[monitor_api.HistoryPoint], str]) -> Callable[[monitor_api.HistorySeries], str]:
    return lambda series: show(series.points[0])


def _amount(metric: "monitor_api.Metric.ValueType", value: float) -> str:
    return size(value) if metric == monitor_api.Metric.METRIC_MEMORY_USED_BYTES else f"{value:.6g}"


def _slope(trend: monitor_api.Trend) -> str:
    """How much it grows in an hour, with its sign; `-` where too little was seen to say."""
    if not trend.HasField("slope_per_hour"):
        return ABSENT
    sign = "-" if trend.slope_per_hour < 0 else "+"
    return sign + _amount(trend.stats.metric, float(f"{abs(trend.slope_per_hour):.4g}"))


SERIES = View[monitor_api.HistorySeries](
    "series",
    (
        Column("NAME", lambda series: short(series.name)),
        Column("METRIC", lambda series: word(series, "metric")),
        Column(
            "TIME", _point(lambda point: f"{to_datetime(point.start_time).astimezone():%Y-%m-%d %H:%M:%S}")
        ),
        Column("MIN", lambda series: _amount(series.metric, series.points[0].min)),
        Column("MEAN", lambda series: _amount(series.metric, series.points[0].mean)),
        Column("MAX", lambda series: _amount(series.metric, series.points[0].max)),
        Column("SAMPLES", _point(lambda point: str(point.sample_count))),
    ),
)
"""Series of one point each."""

TRENDS = View[monitor_api.Trend](
    "trends",
    (
        Column("NAME", lambda trend: short(trend.name)),
        Column("METRIC", lambda trend: word(trend.stats, "metric")),
        Column("MIN", lambda trend: _amount(trend.stats.metric, trend.stats.min)),
        Column("MEAN", lambda trend: _amount(trend.stats.metric, trend.stats.mean)),
        Column("MAX", lambda trend: _amount(trend.stats.metric, trend.stats.max)),
        Column("PER HOUR", _slope),
        Column("SAMPLES", lambda trend: str(trend.stats.sample_count)),
    ),
)
