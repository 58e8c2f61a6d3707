"""Charts and heat maps, as ECharts options. Pure: messages and numbers in, plain data out.

A missing point is None, which ECharts draws as a gap. A cell of a map is `(column, row, value, label)`. Points and cells are tuples,
since NiceGUI watches every list for changes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import groupby, pairwise
from statistics import mode
from typing import TypeAlias

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.wire import seconds, to_datetime
from gpuscale.dashboard.facts import GpuSummary
from gpuscale.dashboard.rows import mean

Json: TypeAlias = Mapping[str, "Json"] | Sequence["Json"] | str | float | int | bool | None
Options: TypeAlias = dict[str, Json]
Point: TypeAlias = monitor_api.HistoryPoint

NIGHT: Mapping[str, str] = {"#55626e": "#aeb9c4", "#7f8b97": "#6b7885"}
"""Colours of text and lines in light mode, and their counterparts in dark mode."""


def _by_mode(day: str) -> Options:
    # The browser evaluates the value of a key that begins with a colon as JavaScript (NiceGUI).
    return {":color": f"document.body.classList.contains('body--dark') ? '{NIGHT[day]}' : '{day}'"}


INK: Options = _by_mode("#55626e")
"""Colour of text in charts: contrast of at least 4.5 to 1 (WCAG AA)."""
RULE: Options = _by_mode("#7f8b97")
"""Colour of axes and of the grid: contrast of at least 3 to 1."""
LEGEND: Options = {"legend": {"top": 0, "right": 0, "textStyle": INK}}
_BRUSH: Options = {"brush": {"xAxisIndex": 0}, "toolbox": {"show": False}}
LINE, SECOND, QUIET = "#3aa99f", "#e0b341", "#8795a1"


def band(series: monitor_api.HistorySeries | None, title: str, unit: str) -> Options:
    """One metric over time: a line for the mean, a band from the smallest to the largest value."""
    points = series.points if series is not None else ()
    plain: Options = {"type": "line", "symbol": "none"}
    edge: Options = plain | {"stack": "band", "lineStyle": {"opacity": 0}}
    filled: Options = {"areaStyle": {"color": LINE, "opacity": 0.25}}
    return _timed(
        title,
        unit,
        [
            edge | {"name": "min", "data": _line(points, lambda point: point.min)},
            # The band is stacked on its lower edge, so its height is the difference.
            edge | {"name": "spread", "data": _line(points, lambda point: point.max - point.min)} | filled,
            plain | {"name": "mean", "data": _line(points, lambda point: point.mean), "color": LINE},
        ],
    )


def lines(series: Sequence[tuple[str, monitor_api.HistorySeries]], title: str, unit: str) -> Options:
    """The mean of one metric over time, one line per (label, series)."""
    drawn: list[Json] = [
        {"type": "line", "name": label, "symbol": "none", "data": _line(one.points, lambda point: point.mean)}
        for label, one in series
    ]
    legend: Json = {"type": "scroll", "top": 0, "left": 110, "right": 0, "textStyle": INK}
    return _timed(title, unit, drawn) | {"legend": legend}


MOST_BARS = 20
"""Most bars in a chart; the largest are shown."""


def hours(microseconds: float) -> float:
    """GPU microseconds in GPU hours."""
    return microseconds / 3.6e9


def hours_used(rows: Sequence[tuple[str, allocator_api.UsageRow]]) -> Options:
    """A bar per (label, usage): GPU hours busy, idle and unknown."""
    shown = [*reversed(rows[:MOST_BARS])]  # ECharts draws the first at the bottom
    return LEGEND | {
        "animation": False,
        "title": {"text": "GPU hours", "left": 0, "textStyle": {"fontSize": 13, **INK}},
        "tooltip": {"trigger": "axis", "axisPointer": {"type": "shadow"}},
        "grid": {"left": 8, "right": 24, "top": 40, "bottom": 8, "containLabel": True},
        "xAxis": {"type": "value", "axisLabel": INK, "splitLine": {"lineStyle": RULE}},
        "yAxis": {"type": "category", "data": tuple(label for label, _ in shown), "axisLabel": INK},
        "series": [
            {
                "type": "bar",
                "stack": "hours",
                "name": name,
                "color": color,
                "data": tuple(round(hours(getattr(one, f"{name}_gpu_microseconds")), 2) for _, one in shown),
            }
            for name, color in (("busy", LINE), ("idle", SECOND), ("unknown", QUIET))
        ],
    }


def _line(points: Sequence[Point], value: Callable[[Point], float]) -> tuple[Json, ...]:
    """A line through a value of each point, with a gap where more than two points are missing.

    A point of many samples spans their time: history kept over a restart has longer steps than what follows.
    """
    times = [point.start_time.ToMilliseconds() for point in points]
    apart = [later - at for at, later in pairwise(times)]
    step = min(apart, default=0)
    counts = [point.sample_count for point in points]
    period = min((gap / max(count, 1) for gap, count in zip(apart, counts, strict=False)), default=0.0)
    found: list[Json] = []
    for nth, (at, point) in enumerate(zip(times, points, strict=True)):
        if nth and apart[nth - 1] > 3.5 * max(step, counts[nth - 1] * period):
            found.append((at - step, None))
        found.append((at, round(value(point), 2)))
    return tuple(found)


def _timed(title: str, unit: str, series: list[Json], *, whole: bool = False, top: int = 52) -> Options:
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
    # With fewer than two points ECharts draws an axis of several days.
    data = [one.get("data") for one in series if isinstance(one, dict)]
    known = any(isinstance(points, Sequence) and len(points) > 1 for points in data)
    axis["show"] = known
    return {
        "animation": False,
        **_BRUSH,
        "title": {
            "text": title + ": no values yet" * (not known),
            "left": 0,
            "textStyle": {"fontSize": 13, **INK},
        },
        "tooltip": {"trigger": "axis"},
        "grid": {"left": 8, "right": 12, "top": top, "bottom": 8, "containLabel": True},
        "xAxis": {
            "type": "time",
            "show": known,
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
    """Replicas wanted and granted over time, with the bounds and a mark for each change."""
    ordered = sorted(decisions, key=lambda one: one.create_time.ToMilliseconds())
    end = round(now.timestamp() * 1000)
    wanted: list[Json] = [(one.create_time.ToMilliseconds(), one.wanted) for one in ordered]
    granted: list[Json] = [(one.create_time.ToMilliseconds(), one.granted) for one in ordered]
    if ordered:
        wanted.append((end, ordered[-1].wanted))
        granted.append((end, ordered[-1].granted))
    marks: list[Json] = [
        {
            "coord": [one.create_time.ToMilliseconds(), one.wanted],
            "name": one.summary,
            "value": one.wanted - one.before,
            "to": f"/{one.name}",
        }
        for one in ordered
        if one.wanted != one.before
    ]
    few = len(marks) <= 12  # many marks are small, with their text in the tooltip
    pins: Options = {
        "data": marks,
        "symbol": "pin" if few else "circle",
        "symbolSize": 34 if few else 8,
        "label": {"show": few},
        "tooltip": {"formatter": "{b}"},
    }
    least, most = endpoint.spec.min_replicas, endpoint.spec.max_replicas
    shown: list[Json] = [{"yAxis": least, "name": "min"}] if ordered else []  # an empty chart has no heights
    highest = max((one.wanted for one in ordered), default=0)
    if ordered and least < most <= max(8, 3 * highest):  # leave out a bound far above the line
        shown.append({"yAxis": most, "name": "max"})
    label: Options = {"formatter": "{b}", "position": "insideEndTop", **INK}
    bounds: Options = {"data": shown, "symbol": "none", "label": label, "lineStyle": {"color": QUIET}}
    line: Options = {"type": "line", "step": "end", "symbol": "none"}
    marked: Options = {"markPoint": pins, "markLine": bounds}
    drawn: list[Json] = [
        line | {"name": "wanted", "data": tuple(wanted), "color": SECOND} | marked,
        line | {"name": "granted", "data": tuple(granted), "color": LINE},
    ]
    return LEGEND | _timed("replicas", "", drawn, whole=True, top=72)  # pins stand above the line


def signals(read: Sequence[autoscaler_api.SignalHistory]) -> Options:
    """The value of each signal at every evaluation; a gap where it was not usable."""
    drawn: list[Json] = []
    for signal in read:
        points: list[Json] = []
        for one in signal.samples:  # the first and the last moment of a value
            counts = one.status == autoscaler_api.Observation.STATUS_OK and one.HasField("value")
            value = one.value if counts else None
            points.append((one.start_time.ToMilliseconds(), value))
            if one.end_time != one.start_time:
                points.append((one.end_time.ToMilliseconds(), value))
        drawn.append({"type": "line", "name": signal.signal, "data": tuple(points), "symbol": "none"})
    return _timed("signals", "", drawn) | LEGEND


HEAT = ("#243b53", "#2f6f8f", "#3aa99f", "#e0b341", "#e4672f", "#c4314b")
"""Colours from idle to full; they differ in lightness too, for colour-blind readers."""
LONGEST_ROW = 32
"""Most GPUs of a node in one row; a node with more takes several rows."""
MOST_ROWS = 16
"""Most rows; beyond them nodes stand side by side."""
MOST_CELLS = 2048
"""Most GPUs with a cell each; beyond them a cell is a node."""
LABEL_HEIGHT = 14
"""Least pixels between the labels of two rows."""
EMPTY = "-"
# By default ECharts draws large maps in parts, and half a map misleads.
_AT_ONCE: Options = {"progressive": 0, "progressiveThreshold": 1_000_000}
Value = Callable[[GpuSummary], float | None]
Merge = Callable[[Iterable[float | None]], float | None]
"""Computes the value of a node from those of its GPUs."""
CALM = "#9fb3c0"
KINDS = (
    "#5b8def", "#e0b341", "#3aa99f", "#c4314b", "#8e6bbf",
    "#e4672f", "#6b8e23", "#d17fb0", "#2f6f8f", "#a0522d",
)  # fmt: skip
"""Colours of words; neighbours differ in lightness too."""
ALARMS = ("#c4314b", "#e4672f", "#e0b341", "#8e6bbf", "#5b8def", "#a0522d")
"""Colours of states that need attention."""


def map_by(
    gpus: Sequence[GpuSummary], word: Callable[[GpuSummary], str], calm: str, kinds: Sequence[str] = KINDS
) -> tuple[Options, dict[str, str]]:
    """The map coloured by a word, such as the holder, and the legend: `calm`, the most frequent words, and "others"."""
    words = {gpu.uuid: word(gpu) for gpu in gpus}
    frequent = [one for one, _ in Counter(words.values()).most_common() if one != calm]
    shown = [calm, *frequent[: len(kinds)], *(["others"] if len(frequent) > len(kinds) else [])]
    numbers = {one: number for number, one in enumerate(shown)}
    colours = [CALM, *kinds[: len(frequent)], QUIET][: len(shown)]
    options = map_of(gpus, lambda gpu: numbers.get(words[gpu.uuid], len(shown) - 1), "", 0.0, mode)
    pieces: Json = [{"value": number, "color": colour} for number, colour in enumerate(colours)]
    scale: Options = {"type": "piecewise", "dimension": 2, "pieces": pieces, "show": False}
    # A tooltip is HTML, and holders are free text.
    tip = f"one => plain(one.data[3] + ': ' + {json.dumps(shown)}[one.data[2]])"
    more: Options = {"visualMap": scale, "tooltip": {":formatter": tip}}
    return options | more, dict(zip(shown, colours, strict=True))


def map_of(gpus: Sequence[GpuSummary], value: Value, unit: str, top: float, merge: Merge = mean) -> Options:
    """One cell per GPU, or per node if there are too many, coloured by `value` from 0 to `top`."""
    by_node = groupby(gpus, key=lambda gpu: gpu.node)
    cells = [(node, [(gpu.label, value(gpu)) for gpu in found]) for node, found in by_node]
    if len(gpus) > MOST_CELLS:
        means = [(node, merge(read for _, read in found)) for node, found in cells]
        cells = [(means[at][0], means[at : at + LONGEST_ROW]) for at in range(0, len(means), LONGEST_ROW)]
    blocks = [
        (f"{label} +{at // LONGEST_ROW}" if at else label, found[at : at + LONGEST_ROW])
        for label, found in cells
        for at in range(0, len(found), LONGEST_ROW)
    ]
    abreast = max(1, -(-len(blocks) // MOST_ROWS))
    widest = max((len(found) for _, found in blocks), default=1)
    placed = tuple(
        (nth % abreast * (widest + 1) + column, nth // abreast, _cell_value(read), label)
        for nth, (_, found) in enumerate(blocks)
        for column, (label, read) in enumerate(found)
    )
    labels = [label for label, _ in blocks[::abreast]]
    columns = [str(number) if abreast == 1 else "" for number in range(abreast * (widest + 1) - 1)]
    return _heat(columns, labels, placed, unit, top)


def rows_of(options: Options) -> int:
    """The number of rows of a map."""
    axis = options["yAxis"]
    labels = axis["data"] if isinstance(axis, dict) else ()
    return len(labels) if isinstance(labels, list) else 0


def over_time(
    lines: Sequence[tuple[str, monitor_api.HistorySeries | None]],
    answer: monitor_api.QueryHistoryResponse,
    unit: str,
    top: float,
) -> Options:
    """A row per line (label and series), a column per step of the answer's time span, coloured by the mean."""
    times, step = columns(answer), max(seconds(answer.step), 1.0)
    start, count = times[0] / 1000, len(times)
    placed: list[Json] = []
    for row, (label, series) in enumerate(lines):
        for point in series.points if series is not None else ():
            column = round((to_datetime(point.start_time).timestamp() - start) / step)
            if 0 <= column < count:
                placed.append((column, row, _cell_value(point.mean), label))
    labels = [label for label, _ in lines]
    every = -(-LABEL_HEIGHT // row_height(len(labels)))
    return _heat(times, labels, tuple(placed), unit, top, every=every, length=count * step)


def columns(answer: monitor_api.QueryHistoryResponse) -> list[int]:
    """The start of each step of an answer, in milliseconds since 1970."""
    step = max(seconds(answer.step), 1.0)
    start, end = to_datetime(answer.start_time).timestamp(), to_datetime(answer.end_time).timestamp()
    return [round(1000 * (start + number * step)) for number in range(max(1, round((end - start) / step)))]


def row_height(count: int) -> int:
    """Height of a row in pixels: large for few rows, small enough to see many at once."""
    return max(7, min(24, 900 // max(1, count)))


def _cell_value(value: float | None) -> Json:
    return EMPTY if value is None else round(value, 1)


def _heat(
    columns: Sequence[str | int],
    rows: Sequence[str],
    cells: Sequence[Json],
    unit: str,
    top: float,
    *,
    every: int = 1,
    length: float | None = None,
) -> Options:
    """The options; every `every`-th row has a label. With `length`, the seconds spanned, columns are times."""
    named = "one.name" if length is None else f"moment(one.name, {length:.0f})"
    timed: Options = {} if length is None else {":formatter": f"at => moment(at, {length:.0f})"}
    bare: Options = {"type": "category", "axisTick": {"show": False}, "axisLine": {"show": False}}
    border: Options = {"borderColor": "rgba(128,128,128,0.35)", "borderWidth": 1 if every == 1 else 0}
    series: Options = {"type": "heatmap", "data": cells, "itemStyle": border, **_AT_ONCE}
    return {
        "animation": False,
        **({} if length is None else _BRUSH),
        # NiceGUI lets a browser read what stands under a key with a colon as JavaScript.
        "tooltip": {
            ":formatter": f"one => one.data[3] + (one.name ? ' · ' + {named} : '') + ': ' + one.data[2] + '{unit}'"
        },
        "grid": {"left": 8, "right": 8, "top": 8, "bottom": 36, "containLabel": True},
        "xAxis": bare | {"data": list(columns), "axisLabel": INK | timed},
        "yAxis": bare | {"data": list(rows), "inverse": True, "axisLabel": {"interval": every - 1, **INK}},
        "visualMap": {
            "min": 0,
            "max": top,
            "dimension": 2,
            "orient": "horizontal",
            "left": "center",
            "bottom": 0,
            "textStyle": INK,
            "itemHeight": 120,
            "itemWidth": 10,
            "text": [f"{top:g}{unit}", f"0{unit}"],
            "inRange": {"color": list(HEAT)},
        },
        "series": [series],
    }
