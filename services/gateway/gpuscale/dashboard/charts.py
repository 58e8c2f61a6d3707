"""Charts, as option dictionaries of ECharts. Pure: messages and numbers in, plain data out.

A point that was not read is None, which ECharts leaves out: gaps stay gaps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TypeAlias

from google.protobuf.timestamp_pb2 import Timestamp

from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.wire import to_datetime
from gpuscale.dashboard.facts import GpuFacts

Json: TypeAlias = Mapping[str, "Json"] | Sequence["Json"] | str | float | int | bool | None
Options: TypeAlias = dict[str, Json]

HEAT = ("#243b53", "#2f6f8f", "#3aa99f", "#e0b341", "#e4672f", "#c4314b")
"""Colours from idle to full; told apart with the common kinds of colour blindness by their lightness too."""
LINE, SECOND, THIRD, QUIET = "#3aa99f", "#e0b341", "#5b8def", "#8795a1"
LONGEST_ROW = 32
"""GPUs side by side in the map; a node with more takes several rows."""


def millis(time: Timestamp) -> float:
    """A time as browsers count it."""
    return to_datetime(time).timestamp() * 1000.0


def map_of(
    gpus: Sequence[GpuFacts], value: Callable[[GpuFacts], float | None], unit: str, top: float
) -> Options:
    """One cell a GPU, a row a node, by `value` from 0 to `top`; a GPU without a reading has an empty cell."""
    rows: list[str] = []
    cells: list[Json] = []
    place: dict[str, int] = {}
    widest = 1
    for gpu in gpus:
        nth = place.get(gpu.node, 0)
        place[gpu.node] = nth + 1
        row = gpu.node if nth < LONGEST_ROW else f"{gpu.node} +{nth // LONGEST_ROW}"
        if not rows or rows[-1] != row:
            rows.append(row)
        read = value(gpu)
        column = nth % LONGEST_ROW
        widest = max(widest, column + 1)
        shown: Json = round(read, 1) if read is not None else "-"
        cells.append({"value": [column, len(rows) - 1, shown], "name": f"{gpu.label} {gpu.model}"})
    return {
        "animation": False,
        "tooltip": {"formatter": "{b}: {c}" + unit},
        "grid": {"left": 8, "right": 8, "top": 8, "bottom": 36, "containLabel": True},
        "xAxis": {"type": "category", "data": [str(number) for number in range(widest)]},
        "yAxis": {"type": "category", "data": list(rows), "inverse": True},
        "visualMap": {
            "min": 0,
            "max": top,
            "orient": "horizontal",
            "left": "center",
            "bottom": 0,
            "itemHeight": 120,
            "itemWidth": 10,
            "text": [f"{top:g}{unit}", f"0{unit}"],
            "inRange": {"color": list(HEAT)},
        },
        "series": [
            {
                "type": "heatmap",
                "data": cells,
                "itemStyle": {"borderColor": "rgba(128,128,128,0.35)", "borderWidth": 1},
            }
        ],
    }


def band(series: monitor_api.HistorySeries | None, title: str, unit: str) -> Options:
    """The mean of one metric over time as a line, within its smallest and largest value as a band."""
    points = list(series.points) if series is not None else []
    times = [millis(point.start_time) for point in points]
    low = [[at, _rounded(point.min)] for at, point in zip(times, points, strict=True)]
    # The band is drawn on top of its lower edge, so it is as high as the difference.
    high = [[at, _rounded(point.max - point.min)] for at, point in zip(times, points, strict=True)]
    mean = [[at, _rounded(point.mean)] for at, point in zip(times, points, strict=True)]
    hidden: Json = {"opacity": 0}
    return _timed(
        title,
        unit,
        [
            {
                "type": "line",
                "name": "min",
                "data": low,
                "stack": "band",
                "symbol": "none",
                "lineStyle": hidden,
            },
            {
                "type": "line",
                "name": "spread",
                "data": high,
                "stack": "band",
                "symbol": "none",
                "lineStyle": hidden,
                "areaStyle": {"color": LINE, "opacity": 0.25},
            },
            {"type": "line", "name": "mean", "data": mean, "symbol": "none", "color": LINE},
        ],
    )


def _rounded(value: float) -> float:
    return round(value, 2)


def _timed(title: str, unit: str, series: list[Json]) -> Options:
    axis: dict[str, Json] = {"type": "value", "min": 0, "axisLabel": {"formatter": "{value}" + unit}}
    if unit == "%":
        axis["max"] = 100
    return {
        "animation": False,
        "title": {"text": title, "left": 0, "textStyle": {"fontSize": 13, "color": QUIET}},
        "tooltip": {"trigger": "axis"},
        "grid": {"left": 8, "right": 12, "top": 40, "bottom": 8, "containLabel": True},
        "xAxis": {"type": "time"},
        "yAxis": axis,
        "series": series,
    }


def scaling(
    endpoint: autoscaler_api.Endpoint, decisions: Sequence[autoscaler_api.Decision], now: datetime
) -> Options:
    """Replicas wanted and granted over time, between the bounds, with what the signals read, and why it changed."""
    ordered = sorted(decisions, key=lambda one: millis(one.create_time))
    end = now.timestamp() * 1000.0
    wanted: list[Json] = [[millis(one.create_time), one.wanted] for one in ordered]
    granted: list[Json] = [[millis(one.create_time), one.granted] for one in ordered]
    if ordered:
        wanted.append([end, ordered[-1].wanted])
        granted.append([end, ordered[-1].granted])
    marks: list[Json] = [
        {
            "coord": [millis(one.create_time), one.wanted],
            "name": one.summary,
            "value": one.wanted - one.before,
        }
        for one in ordered
        if one.wanted != one.before
    ]
    bounds: Json = [
        {"yAxis": endpoint.spec.min_replicas, "name": "min"},
        {"yAxis": endpoint.spec.max_replicas, "name": "max"},
    ]
    options = _timed(
        "replicas",
        "",
        [
            {
                "type": "line",
                "step": "end",
                "name": "wanted",
                "data": wanted,
                "color": SECOND,
                "symbol": "none",
                "markPoint": {"data": marks, "symbolSize": 34, "tooltip": {"formatter": "{b}"}},
                "markLine": {
                    "data": bounds,
                    "symbol": "none",
                    "label": {"formatter": "{b}", "position": "insideEndTop"},
                },
            },
            {
                "type": "line",
                "step": "end",
                "name": "granted",
                "data": granted,
                "color": LINE,
                "symbol": "none",
            },
        ],
    )
    return options | {"legend": {"top": 0, "right": 0, "textStyle": {"color": QUIET}}}


def signals(decisions: Sequence[autoscaler_api.Decision]) -> Options:
    """What each signal read, at each decision."""
    ordered = sorted(decisions, key=lambda one: millis(one.create_time))
    read: dict[str, list[Json]] = {}
    for one in ordered:
        for seen in one.observations:
            value = seen.value if seen.HasField("value") else None
            for at in (one.create_time, one.last_time):
                read.setdefault(seen.signal, []).append([millis(at), value])
    lines: list[Json] = [
        {"type": "line", "name": name, "data": points, "symbol": "none"} for name, points in read.items()
    ]
    return _timed("signals", "", lines) | {"legend": {"top": 0, "right": 0, "textStyle": {"color": QUIET}}}
