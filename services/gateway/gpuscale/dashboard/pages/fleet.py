"""The fleet: a map of all GPUs now and over time, the page of a GPU, and the health events."""

from collections.abc import Callable, Sequence
from functools import partial

from nicegui import ui
from nicegui.events import GenericEventArguments

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.client.states import marks
from gpuscale.common.names import short_holder
from gpuscale.common.wire import seconds, to_duration
from gpuscale.dashboard import charts, frame, humanize, rows
from gpuscale.dashboard.facts import GpuSummary
from gpuscale.dashboard.frame import ACT, Chart, DashboardSite, ListTable, PageAddress, Tiles, live, page

FILTER = "filter: node, model, state, holder"


READINGS: dict[str, tuple[charts.Value, str]] = {
    "utilization": (lambda gpu: gpu.utilization, "%"),
    "memory": (lambda gpu: gpu.memory_percent, "%"),
    "temperature": (lambda gpu: gpu.temperature, "°C"),
    "power": (lambda gpu: gpu.power_percent, "% of limit"),
    "reserved": (lambda gpu: gpu.held_milli / 10.0, "%"),
}
"""Readings the map can show, with their unit; the last colour stands for 100."""
WORDS: dict[str, tuple[Callable[[GpuSummary], str], str, Sequence[str]]] = {
    "holder": (
        lambda gpu: ", ".join(sorted(set(map(rows.whose, gpu.holders)))) or "nobody",
        "nobody",
        charts.KINDS,
    ),
    "state": (lambda gpu: gpu.state.lower().partition(":")[0], "ok", charts.ALARMS),
}
"""Words the map can show, each by a colour: the calm word, and the colours of the others."""


def fleet_page(site: DashboardSite) -> None:
    """Build the page."""
    with page(site, "Fleet"):
        tiles = Tiles("nodes online", "GPUs", "reserved", "mean utilization", "memory in use", "power")
        with ui.row().classes("items-center full-width"):
            address = PageAddress()
            chosen = address.choice("show", (*READINGS, *WORDS), "utilization")
            ui.space()
            wanted = address.text("filter", FILTER)
        heat = Chart(charts.map_of((), *READINGS["utilization"], 100.0), "map of all GPUs")
        legend = ui.row().style("gap: 4px 16px; font-size: .8rem")
        table = ListTable(rows.GPUS.columns, key="uuid", links=("gpu",), empty="no GPUs, or none match")
        actions = site.actions()
        columns = {**rows.NODES.columns, **({ACT: "act"} if actions and actions.marks else {})}
        nodes = ListTable(columns, key="node", empty="no nodes, or none match")
        if actions is not None:
            nodes.add_acts(lambda node, act: actions.mark(f"nodes/{node}", act))

    explained: dict[str, str] = {}

    def draw() -> None:
        text = str(wanted.value or "")
        gpus, shown = matching(site, text)
        colours: dict[str, str] = {}
        if (word := WORDS.get(str(chosen.value))) is not None:
            options, colours = charts.map_by(gpus, *word)
        else:
            options = charts.map_of(gpus, *READINGS[str(chosen.value)], 100.0)
        heat.show(options, height=90 + 24 * max(2, charts.rows_of(options)))
        if colours != explained:
            explained.clear()
            explained.update(colours)
            legend.clear()
            with legend:
                for one, colour in colours.items():
                    border = f"border-left: 14px solid {colour}; padding-left: 6px"
                    ui.label(one).classes("gs-line").style(border)
        table.show(shown)
        marked, allowed = marks(site.facts.cordons), actions.marks if actions else ()
        found = rows.NODES.rows((node, marked) for _, node in sorted(site.facts.nodes.items()))
        matched = [row for row in found if rows.matches(row, text)]
        nodes.show(
            [{**row, ACT: [act for act in acts(str(row["state"])) if act in allowed]} for row in matched]
        )
        tiles.show(**rows.fleet_figures(list(site.facts.nodes.values()), gpus))

    def go(event: GenericEventArguments) -> None:
        label = str(event.args["data"][3])
        found = next((gpu for gpu in site.gpus() if gpu.label == label), None)
        if found is not None:
            ui.navigate.to(f"/gpus/{found.node}/{found.uuid}")
        else:
            wanted.value = f"{label}/"

    live(site.facts, draw)
    chosen.on_value_change(draw)
    wanted.on_value_change(draw)
    heat.element.on("componentClick", go, ["data"])


def acts(state: str) -> list[str]:
    """The actions for a node or GPU in this state."""
    if "draining" in state:
        return ["uncordon"]
    return ["uncordon", "drain"] if "cordoned" in state else ["cordon", "drain"]


def matching(site: DashboardSite, text: str) -> tuple[list[GpuSummary], list[rows.Row]]:
    """The GPUs whose rows match every word of `text`, and those rows."""
    found = [
        (gpu, row)
        for gpu, row in zip(site.gpus(), site.gpu_rows(), strict=True)
        if not text or rows.matches(row, text)
    ]
    return [gpu for gpu, _ in found], [row for _, row in found]


GPU_REFRESH = 2.0
"""Seconds between queries of the history."""
SPANS = {"10 min": 600.0, "1 h": 3600.0, "6 h": 21600.0, "24 h": 86400.0, "7 d": 604800.0}
POINTS = 200
"""Most points of a chart, about."""
Metric = monitor_api.Metric
CHARTS = (
    (Metric.METRIC_UTILIZATION_PERCENT, "utilization", "%"),
    (Metric.METRIC_MEMORY_USED_PERCENT, "memory", "%"),
    (Metric.METRIC_TEMPERATURE_CELSIUS, "temperature", "°C"),
    (Metric.METRIC_POWER_WATTS, "power", "W"),
    (Metric.METRIC_SM_CLOCK_MHZ, "SM clock", "MHz"),
    (Metric.METRIC_MEMORY_UTILIZATION_PERCENT, "memory traffic", "%"),
)


def gpu_page(site: DashboardSite, node: str, uuid: str) -> None:
    """Build the page of `uuid`, in any case, on `node`."""
    uuid = next((gpu.uuid for gpu in site.gpus() if gpu.uuid.lower() == uuid.lower()), uuid)
    with page(site, f"GPU {uuid}"):
        head = ui.label(f"{node} · {uuid}").classes("text-h6")
        tiles = Tiles("state", "utilization", "memory", "temperature", "power", "reserved by")
        with ui.row().classes("items-center full-width"):
            span = PageAddress().span(SPANS, "10 min")
            ui.space()
            buttons: dict[str, ui.button] = {}
            if (actions := site.actions()) is not None:
                for act in actions.marks:
                    marked = partial(actions.mark, f"nodes/{node}/gpus/{uuid.lower()}", act)
                    buttons[act] = ui.button(act, on_click=marked).props("flat dense no-caps")
        with ui.element("div").classes("gs-charts"):
            drawn = [Chart(charts.band(None, title, unit), title) for _, title, unit in CHARTS]
            for chart in drawn:
                span.drawn_on(chart)
        note = ui.label().classes("gs-quiet")
        empty = "no processes, or they cannot be read"
        running = ListTable(rows.PROCESSES.columns, key="pid", links=("reservation",), empty=empty)
        with ui.element("div").classes("gs-charts"):
            topics = {
                topic: ListTable({"reading": topic, "value": "value"}, key="reading", empty="not reported")
                for topic in rows.TOPICS
            }

    def show() -> None:
        found = next((gpu for gpu in site.gpus() if (gpu.node, gpu.uuid) == (node, uuid)), None)
        if found is None:
            head.text = f"{node} · {uuid}: not reported"
            tiles.clear()
            return
        head.text = f"{found.label} · {found.model} · {uuid}" + (" · simulated" if found.simulated else "")
        tiles.show(
            state=humanize.state(found.state),
            utilization=humanize.number(found.utilization, "%"),
            memory=humanize.part(found.memory_used, found.memory_total),
            temperature=humanize.number(found.temperature, "°C"),
            power=f"{humanize.number(found.power)} / {humanize.number(found.power_limit, 'W')}",
            reserved_by=", ".join(map(short_holder, found.holders)) or "nobody",
        )
        for act, button in buttons.items():
            button.set_visibility(act in acts(found.state.lower()))
        running.show(rows.PROCESSES.rows(found.reading.processes))
        for topic, told in rows.by_topic(found.reading).items():
            topics[topic].show(told)

    async def refresh() -> None:
        asked, length = span.asked()
        request = monitor_api.QueryHistoryRequest(
            uuids=[uuid],
            metrics=[metric for metric, _, _ in CHARTS],
            span=asked,
            step=to_duration(max(1.0, length / POINTS)),
        )
        with frame.reading("the history", note):
            answer = await site.client.history.QueryHistory(request)
            found = {series.metric: series for series in answer.series}
            for chart, (metric, title, unit) in zip(drawn, CHARTS, strict=True):
                chart.show(charts.band(found.get(metric), title, unit))
            note.text = history_note(answer)

    live(site.facts, show)
    ui.timer(GPU_REFRESH, refresh)
    span.start.on_value_change(refresh)


def history_note(answer: monitor_api.QueryHistoryResponse) -> str:
    """A note on what the charts of a GPU show, or why they are empty."""
    if answer.not_kept:
        return "no history yet, or the fleet's memory for history is full"
    return f"a point every {humanize.length(answer.step)}; line: mean, band: smallest to largest"


TIMELINE_REFRESH = 5.0
"""Least seconds between queries of the history: one per column."""
STEPS = 120
"""Most columns, about."""
MOST_GPUS = 96
"""Most GPUs with a row each; beyond them a row is a node."""
MOST_NAMES = 256
"""Most nodes in one query."""
METRICS = {
    "utilization": (Metric.METRIC_UTILIZATION_PERCENT, "%", 100.0),
    "memory": (Metric.METRIC_MEMORY_USED_PERCENT, "%", 100.0),
    "temperature": (Metric.METRIC_TEMPERATURE_CELSIUS, "°C", 100.0),
    "power": (Metric.METRIC_POWER_WATTS, "W", 800.0),
}


def timeline_page(site: DashboardSite) -> None:
    """Build the page."""
    with page(site, "Over time"):
        with ui.row().classes("items-center full-width"):
            address = PageAddress()
            chosen = address.choice("show", METRICS, "utilization")
            span = address.span(SPANS, "1 h")
            ui.space()
            wanted = address.text("filter", FILTER)
        nothing = charts.over_time((), monitor_api.QueryHistoryResponse(), "%", 100.0)
        heat = Chart(nothing, "map of GPUs over time")
        columns: list[float] = []
        span.drawn_on(heat, lambda: columns)
        note = ui.label().classes("gs-quiet")

    async def refresh() -> None:
        gpus, _ = matching(site, str(wanted.value or ""))
        metric, unit, top = METRICS[str(chosen.value)]
        nodes = sorted({gpu.node for gpu in gpus}) if len(gpus) > MOST_GPUS else []
        if nodes and metric != Metric.METRIC_UTILIZATION_PERCENT:
            note.text = f"{len(gpus)} GPUs are too many for a row each: filter, or choose utilization by node"
            return
        if not gpus:
            note.text = "no GPUs, or none match"
            return
        keys = [(gpu.label, gpu.uuid) for gpu in gpus]
        if nodes:
            keys = [(node, f"nodes/{node}") for node in nodes[:MOST_NAMES]]
        asked, length = span.asked()
        request = monitor_api.QueryHistoryRequest(
            names=[key for _, key in keys if nodes],
            uuids=[key for _, key in keys if not nodes],
            metrics=[metric],
            span=asked,
            step=to_duration(max(1.0, length / STEPS)),
        )
        with frame.reading("the history", note):
            answer = await site.client.history.QueryHistory(request)
            timer.interval = max(TIMELINE_REFRESH, seconds(answer.step))
            found = {series.uuid or series.name: series for series in answer.series}
            lines = [(label, found.get(key)) for label, key in keys]
            height = 90 + len(lines) * charts.row_height(len(lines))
            columns[:] = charts.columns(answer)
            heat.show(charts.over_time(lines, answer, unit, top), height=height)
            note.text = timeline_note(answer, nodes)

    timer = ui.timer(TIMELINE_REFRESH, refresh)
    for one in (chosen, span.start, wanted):
        one.on_value_change(refresh)


def timeline_note(answer: monitor_api.QueryHistoryResponse, nodes: Sequence[str]) -> str:
    """A note on what rows and columns are, and on rows without history."""
    left_out = f"; {len(nodes) - MOST_NAMES} more nodes match" if len(nodes) > MOST_NAMES else ""
    row = "a row is a node, by the mean of its GPUs" if nodes else "a row is a GPU"
    empty = f"; {len(answer.not_kept)} have no history" if answer.not_kept else ""
    return f"{row}; a column is the mean of {humanize.length(answer.step)}{left_out}{empty}"


def health_page(site: DashboardSite) -> None:
    """Build the page."""
    with page(site, "Health"):
        tiles = Tiles(*rows.SEVERITIES)
        every = rows.HEALTH.columns
        first = {name: every[name] for name in ("severity", "message", "action", "where")}
        empty = "nothing is wrong with any GPU or node"
        table = ListTable({**first, **every}, key="name", links=("where",), empty=empty)

    def draw() -> None:
        shown = rows.health_rows(site.facts)
        table.show(shown)
        tiles.show(**{word: str(sum(row["severity"] == word for row in shown)) for word in rows.SEVERITIES})

    live(site.facts, draw)
