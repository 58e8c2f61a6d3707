"""Recordings; the page of one has a chart per reading, and mean, smallest and largest value per GPU."""

from collections.abc import Callable

from nicegui import ui

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.client import pages_async
from gpuscale.common.wire import seconds, to_duration
from gpuscale.dashboard import charts, humanize
from gpuscale.dashboard.frame import Chart, DashboardSite, ListTable, Tiles, live, page, reading
from gpuscale.dashboard.pages.fleet import CHARTS
from gpuscale.dashboard.rows import ResourceTable

RECORDINGS = ResourceTable[monitor_api.Recording](
    name=("recording", lambda one: one.name.removeprefix("recordings/")),
    name_to=("", lambda one: f"/{one.name}"),
    state=("state", lambda one: humanize.word(one, "state")),
    start=("started", lambda one: humanize.clock(one.start_time)),
    duration=("duration", lambda one: humanize.length(one.duration)),
    samples=("samples", lambda one: one.sample_count),
    gpus=("GPUs", lambda one: len(one.gpus)),
)


def recordings_page(site: DashboardSite) -> None:
    """Build the page of all recordings."""
    with page(site, "Recordings"):
        empty = "no recordings: gpuscalectl record -- COMMAND"
        table = ListTable(RECORDINGS.columns, key="name", links=("name",), empty=empty)
        note = ui.label().classes("gs-quiet")
    running = _Running(site)

    async def refresh() -> None:
        with reading("the recordings", note):
            if any(one.state == one.STATE_RUNNING for one in site.facts.recordings):
                await running.ask("state = RUNNING")
            note.text = ""

    live(site.facts, lambda: table.show(RECORDINGS.rows(map(running.now, site.facts.recordings))))
    ui.timer(REFRESH, refresh)


class _Running:
    """Recordings that run, as they are now: the watch tells of their start and end alone."""

    def __init__(self, site: DashboardSite) -> None:
        self._site = site
        self._asked: dict[str, monitor_api.Recording] = {}

    def now(self, one: monitor_api.Recording) -> monitor_api.Recording:
        """A recording as it was when it was last asked for."""
        return self._asked.get(one.name, one) if one.state == one.STATE_RUNNING else one

    async def ask(self, those: str) -> None:
        """Ask for `those` that meet a filter, and forget the others."""
        request = monitor_api.ListRecordingsRequest(filter=those, page_size=1000)
        found = pages_async(self._site.client.recordings.ListRecordings, request)
        self._asked = {one.name: one async for page in found for one in page.recordings}


REFRESH = 2.0
"""Least seconds between queries of the history while it runs: one per point."""
REFRESH_ENDED = 60.0
POINTS = 60
"""Most points of a line, about."""
MOST_LINES = 16
"""Most GPUs drawn as lines; the table has them all."""
Metric = monitor_api.Metric


def recording_page(site: DashboardSite, recording: str) -> None:
    """Build the page of `recordings/{recording}`."""
    name = f"recordings/{recording}"
    with page(site, f"Recording {recording}"):
        head = ui.label(recording).classes("text-h6")
        tiles = Tiles("state", "started", "duration", "samples", "interval")
        with ui.element("div").classes("gs-charts"):
            drawn = [Chart(charts.lines((), title, unit), title) for _, title, unit in CHARTS]
        note = ui.label().classes("gs-quiet")
        table = ListTable(RECORDED_GPUS.columns, key="uuid", links=("gpu",), empty="no GPU was read")

    asked = _Running(site)

    def found() -> monitor_api.Recording | None:
        return next((asked.now(one) for one in site.facts.recordings if one.name == name), None)

    def draw() -> None:
        one = found()
        if one is None:
            head.text = f"{recording}: no such recording, or it was deleted"
            return
        tiles.show(
            state=humanize.word(one, "state"),
            started=f"{humanize.ago(one.start_time)} ago",
            duration=humanize.length(one.duration),
            samples=str(one.sample_count),
            interval=humanize.length(one.interval),
        )
        table.show(RECORDED_GPUS.rows(one.gpus))

    async def refresh() -> None:
        one = found()
        if one is None or not one.gpus:
            return
        with reading("the history", note):
            if one.state == one.STATE_RUNNING:
                await asked.ask(f'name = "{name}"')
            span = monitor_api.HistorySpan(start_time=one.start_time)
            if one.HasField("end_time"):
                span.end_time.CopyFrom(one.end_time)
            request = monitor_api.QueryHistoryRequest(
                uuids=[gpu.uuid for gpu in one.gpus[:MOST_LINES]],
                metrics=[metric for metric, _, _ in CHARTS],
                span=span,
                step=to_duration(max(1.0, seconds(one.duration) / POINTS)),
            )
            answer = await site.client.history.QueryHistory(request)
            kept = {(series.uuid, series.metric): series for series in answer.series}
            running = one.state == monitor_api.Recording.STATE_RUNNING
            timer.interval = max(REFRESH, seconds(answer.step)) if running else REFRESH_ENDED
            for chart, (metric, title, unit) in zip(drawn, CHARTS, strict=True):
                known = [gpu for gpu in one.gpus if (gpu.uuid, metric) in kept]
                chart.show(charts.lines([(label(gpu), kept[gpu.uuid, metric]) for gpu in known], title, unit))
            note.text = history_note(one, answer)

    live(site.facts, draw)
    timer = ui.timer(REFRESH, refresh)


def history_note(one: monitor_api.Recording, answer: monitor_api.QueryHistoryResponse) -> str:
    """A note on what the charts show, and what they leave out."""
    if not answer.series:
        return "no history of that time; the figures below come from the recording"
    more = len(one.gpus) - MOST_LINES
    left_out = f"; {more} more GPUs are in the table" if more > 0 else ""
    return f"from the history: a mean every {humanize.length(answer.step)}{left_out}"


def label(gpu: monitor_api.RecordedGpu) -> str:
    """`node/index`."""
    return f"{gpu.name.split('/')[1]}/{gpu.index}"


def _stats(metric: "Metric.ValueType", unit: str) -> Callable[[monitor_api.RecordedGpu], str]:
    """`37 % (12 to 88)`: the mean, with smallest and largest value."""

    def cell(gpu: monitor_api.RecordedGpu) -> str:
        found = next((one for one in gpu.stats if one.metric == metric), None)
        if found is None:
            return humanize.UNKNOWN
        return f"{humanize.number(found.mean, unit)} ({found.min:.0f} to {found.max:.0f})"

    return cell


RECORDED_GPUS = ResourceTable[monitor_api.RecordedGpu](
    uuid=("", lambda gpu: gpu.uuid),
    gpu=("GPU", label),
    gpu_to=("", lambda gpu: f"/gpus/{gpu.name.split('/')[1]}/{gpu.uuid}"),
    model=("model", lambda gpu: gpu.model),
    utilization=("utilization", _stats(Metric.METRIC_UTILIZATION_PERCENT, "%")),
    memory=("memory", _stats(Metric.METRIC_MEMORY_USED_PERCENT, "%")),
    temperature=("temperature", _stats(Metric.METRIC_TEMPERATURE_CELSIUS, "°C")),
    power=("power", _stats(Metric.METRIC_POWER_WATTS, "W")),
    samples=("samples", lambda gpu: gpu.sample_count),
)
