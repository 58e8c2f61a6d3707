"""One GPU: its charts of the last minutes, with the smallest and largest value, and what it reads now."""

from nicegui import ui

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.client import GpuscaleError
from gpuscale.common.wire import to_duration
from gpuscale.dashboard import charts, words
from gpuscale.dashboard.facts import GpuFacts
from gpuscale.dashboard.frame import Chart, Site, Tiles, live, page

REFRESH = 2.0
"""Seconds between two questions for the history."""
SPANS = {"10 min": 600.0, "1 h": 3600.0, "6 h": 21600.0, "24 h": 86400.0, "7 d": 604800.0}
POINTS = 200
"""Points of a chart, at most about."""
Metric = monitor_api.Metric
CHARTS = (
    (Metric.METRIC_UTILIZATION_PERCENT, "utilization", "%"),
    (Metric.METRIC_MEMORY_USED_PERCENT, "memory", "%"),
    (Metric.METRIC_TEMPERATURE_CELSIUS, "temperature", "°C"),
    (Metric.METRIC_POWER_WATTS, "power", "W"),
)


def build(site: Site, node: str, uuid: str) -> None:
    """Make the page of `uuid` on `node`."""
    with page(site, f"GPU {uuid}"):
        head = ui.label(f"{node} · {uuid}").classes("text-h6")
        tiles = Tiles("state", "utilization", "memory", "temperature", "power", "reserved by")
        chosen = ui.toggle(list(SPANS), value="10 min").props("dense no-caps")
        with ui.element("div").classes("gs-charts"):
            drawn = [Chart(charts.band(None, title, unit)) for _, title, unit in CHARTS]
        note = ui.label().classes("gs-quiet")

    def show() -> None:
        found = next((gpu for gpu in site.gpus() if (gpu.node, gpu.uuid) == (node, uuid)), None)
        if found is None:
            head.text = f"{node} · {uuid}: not known (any more)"
            tiles.clear()
            return
        head.text = f"{found.label} · {found.model} · {uuid}" + (" · simulated" if found.simulated else "")
        tiles.show(**figures(found))

    async def refresh() -> None:
        length = SPANS[str(chosen.value)]
        request = monitor_api.QueryHistoryRequest(
            uuids=[uuid],
            metrics=[metric for metric, _, _ in CHARTS],
            span=monitor_api.HistorySpan(last=to_duration(length)),
            step=to_duration(max(1.0, length / POINTS)),
        )
        try:
            answer = await site.client.history.QueryHistory(request)
        except GpuscaleError as error:
            note.text = f"the history cannot be read: {error.message}"
            return
        found = {series.metric: series for series in answer.series}
        for chart, (metric, title, unit) in zip(drawn, CHARTS, strict=True):
            chart.show(charts.band(found.get(metric), title, unit))
        if answer.not_kept:
            note.text = (
                "no history is kept of it: nothing was read yet, or the fleet's memory for history is used up"
            )
            return
        note.text = f"a point each {words.length(answer.step)}; line: mean, band: smallest to largest"

    live(site.facts, show)
    ui.timer(REFRESH, refresh)
    chosen.on_value_change(refresh)


def figures(gpu: GpuFacts) -> dict[str, str]:
    """What it reads now."""
    return {
        "state": gpu.state.lower(),
        "utilization": words.number(gpu.utilization, "%"),
        "memory": words.part(gpu.memory_used, gpu.memory_total),
        "temperature": words.number(gpu.temperature, "°C"),
        "power": f"{words.number(gpu.power)} / {words.number(gpu.power_limit, 'W')}",
        "reserved_by": ", ".join(gpu.holders) or "nobody",
    }
