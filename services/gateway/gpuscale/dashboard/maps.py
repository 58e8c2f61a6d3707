"""Heat maps, as option dictionaries of ECharts: all GPUs now, and GPUs over time. Pure.

A cell is `(column, row, value, label)`: tuples, which NiceGUI sends as they are, where it would watch each list for changes.
What was not read is an empty cell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import NamedTuple

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.wire import seconds, to_datetime
from gpuscale.dashboard.charts import INK, Json, Options
from gpuscale.dashboard.facts import GpuFacts
from gpuscale.dashboard.rows import mean

HEAT = ("#243b53", "#2f6f8f", "#3aa99f", "#e0b341", "#e4672f", "#c4314b")
"""Colours from idle to full; told apart with the common kinds of colour blindness by their lightness too."""
LONGEST_ROW = 32
"""GPUs side by side of one node; a node with more takes several rows."""
MOST_ROWS = 16
"""Rows before nodes stand side by side."""
MOST_CELLS = 2048
"""GPUs that have a cell each; of more of them, each node has one."""
LABEL_HEIGHT = 14
"""Pixels between the labels of two rows, at least."""
EMPTY = "-"
# ECharts draws large maps in parts, over many frames; half a map says something wrong.
_AT_ONCE: Options = {"progressive": 0, "progressiveThreshold": 1_000_000}
Value = Callable[[GpuFacts], float | None]


class Cell(NamedTuple):
    """What a cell of the map says, and of whom: `node/index`, or a node."""

    label: str
    value: float | None


def by_node(gpus: Sequence[GpuFacts]) -> bool:
    """Whether a cell of the map is a node."""
    return len(gpus) > MOST_CELLS


def map_of(gpus: Sequence[GpuFacts], value: Value, unit: str, top: float) -> Options:
    """One cell a GPU, or a node where they are too many, by `value` from 0 to `top`; nodes stand side by side where they are many."""
    blocks = list(_blocks(gpus, value))
    abreast = max(1, -(-len(blocks) // MOST_ROWS))
    widest = max((len(cells) for _, cells in blocks), default=1)
    placed = tuple(
        (nth % abreast * (widest + 1) + column, nth // abreast, _rounded(cell.value), cell.label)
        for nth, (_, cells) in enumerate(blocks)
        for column, cell in enumerate(cells)
    )
    labels = [label for label, _ in blocks[::abreast]]
    columns = [str(number) if abreast == 1 else "" for number in range(abreast * (widest + 1) - 1)]
    return _heat(columns, labels, placed, unit, top)


def _blocks(gpus: Sequence[GpuFacts], value: Value) -> Iterator[tuple[str, list[Cell]]]:
    """A label and cells that stand together: those of a node, or some nodes."""
    nodes = [(node, list(found)) for node, found in groupby(gpus, key=lambda gpu: gpu.node)]
    if by_node(gpus):
        means = [Cell(node, mean(map(value, found))) for node, found in nodes]
        for start in range(0, len(means), LONGEST_ROW):
            yield means[start].label, means[start : start + LONGEST_ROW]
        return
    for node, found in nodes:
        cells = [Cell(gpu.label, value(gpu)) for gpu in found]
        for start in range(0, len(cells), LONGEST_ROW):
            label = f"{node} +{start // LONGEST_ROW}" if start else node
            yield label, cells[start : start + LONGEST_ROW]


def rows_of(options: Options) -> int:
    """How many rows a map has, to know how high it should be."""
    axis = options["yAxis"]
    labels = axis["data"] if isinstance(axis, dict) else ()
    return len(labels) if isinstance(labels, list) else 0


def over_time(
    lines: Sequence[tuple[str, monitor_api.HistorySeries | None]],
    answer: monitor_api.QueryHistoryResponse,
    unit: str,
    top: float,
) -> Options:
    """A row for each of `lines` (label and series), a column for each step of the answer's span of time, by the mean."""
    step = max(seconds(answer.step), 1.0)
    start, end = to_datetime(answer.start_time).timestamp(), to_datetime(answer.end_time).timestamp()
    count = max(1, round((end - start) / step))
    placed: list[Json] = []
    for row, (label, series) in enumerate(lines):
        for point in series.points if series is not None else ():
            column = round((to_datetime(point.start_time).timestamp() - start) / step)
            if 0 <= column < count:
                placed.append((column, row, _rounded(point.mean), label))
    times = [_clock(start + number * step, span=end - start) for number in range(count)]
    labels = [label for label, _ in lines]
    every = -(-LABEL_HEIGHT // row_height(len(labels)))
    return _heat(times, labels, tuple(placed), unit, top, every=every)


def row_height(count: int) -> int:
    """Pixels of one of so many rows: few can be read well, and many can be seen at once."""
    return max(7, min(24, 900 // max(1, count)))


def _clock(at: float, *, span: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S" if span <= 3600 else "%d. %H:%M")


def _rounded(value: float | None) -> Json:
    return EMPTY if value is None else round(value, 1)


def _heat(
    columns: Sequence[str],
    rows: Sequence[str],
    cells: Sequence[Json],
    unit: str,
    top: float,
    *,
    every: int = 1,
) -> Options:
    """The options; `every` row has a label, and a border where all have."""
    bare: Options = {"type": "category", "axisTick": {"show": False}, "axisLine": {"show": False}}
    border: Options = {"borderColor": "rgba(128,128,128,0.35)", "borderWidth": 1 if every == 1 else 0}
    series: Options = {"type": "heatmap", "data": cells, "itemStyle": border, **_AT_ONCE}
    return {
        "animation": False,
        # NiceGUI lets a browser read what stands under a key with a colon as JavaScript.
        "tooltip": {
            ":formatter": f"one => one.data[3] + (one.name ? ' · ' + one.name : '') + ': ' + one.data[2] + '{unit}'"
        },
        "grid": {"left": 8, "right": 8, "top": 8, "bottom": 36, "containLabel": True},
        "xAxis": bare | {"data": list(columns), "axisLabel": INK},
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
