"""GPUs over time: a row a GPU, or a node where they are many, a column a step of time."""

from collections.abc import Sequence

from nicegui import ui

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.client import GpuscaleError
from gpuscale.common.wire import seconds, to_duration
from gpuscale.dashboard import maps, words
from gpuscale.dashboard.facts import GpuFacts
from gpuscale.dashboard.frame import Chart, Site, page
from gpuscale.dashboard.pages.fleet import FILTER, matching

REFRESH = 5.0
"""Least seconds between two questions for the history: one for each column."""
SPANS = {"10 min": 600.0, "1 h": 3600.0, "6 h": 21600.0, "24 h": 86400.0, "7 d": 604800.0}
STEPS = 120
"""Columns, at most about."""
MOST_GPUS = 96
"""GPUs with a row each; of more of them, each node has one."""
MOST_NAMES = 256
"""Nodes that one question may name."""
Metric = monitor_api.Metric
READINGS = {
    "utilization": (Metric.METRIC_UTILIZATION_PERCENT, "%", 100.0),
    "memory": (Metric.METRIC_MEMORY_USED_PERCENT, "%", 100.0),
    "temperature": (Metric.METRIC_TEMPERATURE_CELSIUS, "°C", 100.0),
    "power": (Metric.METRIC_POWER_WATTS, "W", 800.0),
}


def build(site: Site) -> None:
    """Make the page."""
    with page(site, "Over time"):
        with ui.row().classes("items-center full-width"):
            chosen = ui.toggle(list(READINGS), value="utilization").props("dense no-caps")
            span = ui.toggle(list(SPANS), value="1 h").props("dense no-caps")
            ui.space()
            wanted = ui.input(placeholder=FILTER).props("dense clearable").style("width: 17rem")
        heat = Chart(maps.over_time((), monitor_api.QueryHistoryResponse(), "%", 100.0), mark="over-time")
        note = ui.label().classes("gs-quiet")

    async def refresh() -> None:
        gpus, _ = matching(site, str(wanted.value or ""))
        metric, unit, top = READINGS[str(chosen.value)]
        nodes = sorted({gpu.node for gpu in gpus}) if len(gpus) > MOST_GPUS else []
        if nodes and metric != Metric.METRIC_UTILIZATION_PERCENT:
            note.text = (
                f"{len(gpus)} GPUs are too many for a row each: filter, or look at utilization by node"
            )
            return
        if not gpus:
            note.text = "no GPU is known, or none matches"
            return
        request = question(gpus, nodes, metric, SPANS[str(span.value)])
        try:
            answer = await site.client.history.QueryHistory(request)
        except GpuscaleError as error:
            note.text = f"the history cannot be read: {error.message}"
            return
        timer.interval = max(REFRESH, seconds(answer.step))
        lines = lines_of(answer, gpus, nodes)
        height = 90 + len(lines) * maps.row_height(len(lines))
        heat.show(maps.over_time(lines, answer, unit, top), height=height)
        note.text = explained(answer, nodes)

    timer = ui.timer(REFRESH, refresh)
    for one in (chosen, span, wanted):
        one.on_value_change(refresh)


def question(
    gpus: Sequence[GpuFacts], nodes: Sequence[str], metric: "Metric.ValueType", length: float
) -> monitor_api.QueryHistoryRequest:
    """Asks for `nodes`, or for each GPU where there are none."""
    return monitor_api.QueryHistoryRequest(
        names=[f"nodes/{node}" for node in nodes[:MOST_NAMES]],
        uuids=[] if nodes else [gpu.uuid for gpu in gpus],
        metrics=[metric],
        span=monitor_api.HistorySpan(last=to_duration(length)),
        step=to_duration(max(1.0, length / STEPS)),
    )


def lines_of(
    answer: monitor_api.QueryHistoryResponse, gpus: Sequence[GpuFacts], nodes: Sequence[str]
) -> list[tuple[str, monitor_api.HistorySeries | None]]:
    """The rows of the map, with what is kept of each."""
    by_name = {series.uuid or series.name: series for series in answer.series}
    if nodes:
        return [(node, by_name.get(f"nodes/{node}")) for node in nodes[:MOST_NAMES]]
    return [(gpu.label, by_name.get(gpu.uuid)) for gpu in gpus]


def explained(answer: monitor_api.QueryHistoryResponse, nodes: Sequence[str]) -> str:
    """What a row and a column are."""
    left_out = f"; {len(nodes) - MOST_NAMES} more nodes match" if len(nodes) > MOST_NAMES else ""
    row = "a row is a node, by the mean of its GPUs" if nodes else "a row is a GPU"
    return f"{row}; a column is the mean of {words.length(answer.step)}; times are UTC{left_out}"
