"""Charts, as option dictionaries of ECharts. Pure: messages and numbers in, plain data out.

A point that was not read is None, which ECharts leaves out: gaps stay gaps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import TypeAlias

from google.protobuf.timestamp_pb2 import Timestamp

from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.dashboard.tally import Count

Json: TypeAlias = Mapping[str, "Json"] | Sequence["Json"] | str | float | int | bool | None
Options: TypeAlias = dict[str, Json]

NIGHT: Mapping[str, str] = {"#55626e": "#aeb9c4", "#7f8b97": "#6b7885"}
"""Colours by day, of text and of lines, and what stands for them by night."""


def _by_mode(day: str) -> Options:
    # NiceGUI lets a browser read what stands under a key with a colon as JavaScript.
    return {":color": f"document.body.classList.contains('body--dark') ? '{NIGHT[day]}' : '{day}'"}


INK: Options = _by_mode("#55626e")
"""Colour of text in charts: at least 4.5 to 1 on the page (WCAG AA)."""
RULE: Options = _by_mode("#7f8b97")
"""Colour of axes and of the grid: at least 3 to 1."""
LINE, SECOND, THIRD, QUIET = "#3aa99f", "#e0b341", "#5b8def", "#8795a1"


def millis(time: Timestamp) -> int:
    """A time as browsers count it."""
    return time.seconds * 1000 + time.nanos // 1_000_000


def band(series: monitor_api.HistorySeries | None, title: str, unit: str) -> Options:
    """The mean of one metric over time as a line, within its smallest and largest value as a band."""
    points = list(series.points) if series is not None else []
    times = [millis(point.start_time) for point in points]
    counts = [point.sample_count for point in points]
    low = _line(times, [point.min for point in points], counts)
    # The band is drawn on top of its lower edge, so it is as high as the difference.
    high = _line(times, [point.max - point.min for point in points], counts)
    mean = _line(times, [point.mean for point in points], counts)
    edge: Options = {"type": "line", "stack": "band", "symbol": "none", "lineStyle": {"opacity": 0}}
    filled: Options = {"areaStyle": {"color": LINE, "opacity": 0.25}}
    return _timed(
        title,
        unit,
        [
            edge | {"name": "min", "data": low},
            edge | {"name": "spread", "data": high} | filled,
            {"type": "line", "name": "mean", "data": mean, "symbol": "none", "color": LINE},
        ],
    )


def lines(series: Sequence[tuple[str, monitor_api.HistorySeries]], title: str, unit: str) -> Options:
    """The mean of one metric over time, a line for each of (label, series)."""
    drawn: list[Json] = [
        {
            "type": "line",
            "name": label,
            "data": _line(
                [millis(point.start_time) for point in one.points],
                [point.mean for point in one.points],
                [point.sample_count for point in one.points],
            ),
            "symbol": "none",
        }
        for label, one in series
    ]
    legend: Json = {"type": "scroll", "top": 0, "left": 110, "right": 0, "textStyle": INK}
    return _timed(title, unit, drawn) | {"legend": legend}


def reserved_and_used(counts: Sequence[Count]) -> Options:
    """GPUs that are there, that are reserved, and that of those do something: what lies between is paid for in vain."""
    times = [round(one.at * 1000) for one in counts]
    plain: Options = {"type": "line", "symbol": "none"}
    options = _timed(
        "GPUs reserved and used",
        "",
        [
            plain | {"name": "there", "data": _line(times, [one.total for one in counts]), "color": QUIET},
            plain
            | {"name": "reserved", "data": _line(times, [one.reserved for one in counts]), "color": SECOND}
            | {"areaStyle": {"opacity": 0.35}},
            plain
            | {"name": "used", "data": _line(times, [one.used for one in counts]), "color": LINE}
            | {"areaStyle": {"opacity": 0.8}},
        ],
        whole=True,
    )
    return options | _legend()


def _line(times: Sequence[int], values: Sequence[float], counts: Sequence[int] = ()) -> tuple[Json, ...]:
    """Points of a line, which is broken where more than two points are missing.

    A point of many samples reaches as far as these do: what was kept over a restart has longer steps than what follows.
    Tuples, which NiceGUI sends as they are, where it would watch each list for changes.
    """
    apart = [later - at for at, later in pairwise(times)]
    step = min(apart, default=0)
    period = min((gap / max(count, 1) for gap, count in zip(apart, counts, strict=False)), default=0.0)
    found: list[Json] = []
    for nth, (at, value) in enumerate(zip(times, values, strict=True)):
        reach = max(step, counts[nth - 1] * period if nth and counts else 0.0)
        if nth and apart[nth - 1] > 3.5 * reach:
            found.append((at - step, None))
        found.append((at, _rounded(value)))
    return tuple(found)


def _legend() -> Options:
    return {"legend": {"top": 0, "right": 0, "textStyle": INK}}


def _rounded(value: float) -> float:
    return round(value, 2)


def _timed(title: str, unit: str, series: list[Json], *, whole: bool = False) -> Options:
    axis: dict[str, Json] = {
        "type": "value",
        "min": 0,
        "axisLabel": {"formatter": "{value}" + unit, **INK},
        "splitLine": {"lineStyle": {"type": "dotted", **RULE}},
    }
    if unit == "%":
        axis["max"] = 100
    if whole:
        axis["minInterval"] = 1
    return {
        "animation": False,
        "useUTC": True,
        "title": {"text": title, "left": 0, "textStyle": {"fontSize": 13, **INK}},
        "tooltip": {"trigger": "axis"},
        "grid": {"left": 8, "right": 12, "top": 40, "bottom": 8, "containLabel": True},
        "xAxis": {
            "type": "time",
            "axisLabel": {"hideOverlap": True, **INK},
            "axisLine": {"lineStyle": RULE},
            "axisTick": {"lineStyle": RULE},
        },
        "yAxis": axis,
        "series": series,
    }


def scaling(
    endpoint: autoscaler_api.Endpoint, decisions: Sequence[autoscaler_api.Decision], now: datetime
) -> Options:
    """Replicas wanted and granted over time, between the bounds, with what the signals read, and why it changed."""
    ordered = sorted(decisions, key=lambda one: millis(one.create_time))
    end = round(now.timestamp() * 1000)
    wanted: list[Json] = [(millis(one.create_time), one.wanted) for one in ordered]
    granted: list[Json] = [(millis(one.create_time), one.granted) for one in ordered]
    if ordered:
        wanted.append((end, ordered[-1].wanted))
        granted.append((end, ordered[-1].granted))
    marks: list[Json] = [
        {
            "coord": [millis(one.create_time), one.wanted],
            "name": one.summary,
            "value": one.wanted - one.before,
        }
        for one in ordered
        if one.wanted != one.before
    ]
    line: Options = {"type": "line", "step": "end", "symbol": "none"}
    marked: Options = {
        "markPoint": _pins(marks),
        "markLine": _bounds(endpoint.spec, max((one.wanted for one in ordered), default=0)),
    }
    options = _timed(
        "replicas",
        "",
        [
            line | {"name": "wanted", "data": tuple(wanted), "color": SECOND} | marked,
            line | {"name": "granted", "data": tuple(granted), "color": LINE},
        ],
        whole=True,
    )
    return options | _legend()


def _pins(marks: Sequence[Json]) -> Options:
    """Marks with the change in them; where they are many, small ones that tell it when pointed at."""
    few = len(marks) <= 12
    return {
        "data": list(marks),
        "symbol": "pin" if few else "circle",
        "symbolSize": 34 if few else 8,
        "label": {"show": few},
        "tooltip": {"formatter": "{b}"},
    }


def _bounds(spec: autoscaler_api.EndpointSpec, peak: int) -> Options:
    """Lines at the least and the most replicas; the most only where it is not far above what was ever wanted."""
    shown: list[Json] = [{"yAxis": spec.min_replicas, "name": "min"}]
    if spec.max_replicas <= max(8, 3 * peak):
        shown.append({"yAxis": spec.max_replicas, "name": "max"})
    return {
        "data": shown,
        "symbol": "none",
        "label": {"formatter": "{b}", "position": "insideEndTop", **INK},
        "lineStyle": {"color": QUIET},
    }


def signals(read: Sequence[autoscaler_api.SignalHistory]) -> Options:
    """What each signal read at every evaluation; where a value did not count there is a gap."""
    drawn: list[Json] = [
        {"type": "line", "name": one.signal, "data": tuple(_sampled(one.samples)), "symbol": "none"}
        for one in read
    ]
    return _timed("signals", "", drawn) | _legend()


def _sampled(samples: Iterable[autoscaler_api.SignalSample]) -> Iterator[Json]:
    """A point where a value began to hold, and one where it still did."""
    for one in samples:
        counts = one.status == autoscaler_api.Observation.STATUS_OK and one.HasField("value")
        value = one.value if counts else None
        yield (millis(one.start_time), value)
        if one.end_time != one.start_time:
            yield (millis(one.end_time), value)
