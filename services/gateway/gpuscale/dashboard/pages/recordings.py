"""Recordings: which there are, and of each GPU its mean with the smallest and largest value."""

from collections.abc import Sequence

from nicegui import ui

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.dashboard import words
from gpuscale.dashboard.frame import Site, Table, Tiles, live, page
from gpuscale.dashboard.rows import Row

Metric = monitor_api.Metric
_COLUMNS = {
    "name": "recording",
    "state": "state",
    "start": "started (UTC)",
    "duration": "duration",
    "samples": "samples",
    "gpus": "GPUs",
}
_STATS = {
    "gpu": "GPU",
    "model": "model",
    "utilization": "utilization",
    "memory": "memory",
    "temperature": "temperature",
    "power": "power",
    "samples": "samples",
}


def build(site: Site) -> None:
    """Make the page of all recordings."""
    with page(site, "Recordings"):
        table = Table(
            _COLUMNS, key="name", links=("name",), empty="nothing was recorded: gpuscalectl record -- COMMAND"
        )
    live(site.facts, lambda: table.show([row_of(one) for one in site.facts.recordings]))


def build_one(site: Site, recording: str) -> None:
    """Make the page of `recordings/{recording}`."""
    name = f"recordings/{recording}"
    with page(site, f"Recording {recording}"):
        head = ui.label(recording).classes("text-h6")
        tiles = Tiles("state", "duration", "samples", "interval")
        table = Table(_STATS, key="uuid", empty="no GPU was read")

    def draw() -> None:
        one = next((each for each in site.facts.recordings if each.name == name), None)
        if one is None:
            head.text = f"{recording}: there is no such recording (any more)"
            return
        tiles.show(
            state=words.word(one, "state"),
            duration=words.length(one.duration),
            samples=str(one.sample_count),
            interval=words.length(one.interval),
        )
        table.show([gpu_row(gpu) for gpu in one.gpus])

    live(site.facts, draw)


def row_of(one: monitor_api.Recording) -> Row:
    """What the table shows of a recording."""
    name = one.name.removeprefix("recordings/")
    return {
        "name": name,
        "name_to": f"/recordings/{name}",
        "state": words.word(one, "state"),
        "start": words.clock(one.start_time),
        "duration": words.length(one.duration),
        "samples": one.sample_count,
        "gpus": len(one.gpus),
    }


def gpu_row(gpu: monitor_api.RecordedGpu) -> Row:
    """What the table shows of a recorded GPU: means, with smallest and largest value."""
    return {
        "uuid": gpu.uuid,
        "gpu": f"{gpu.name.split('/')[1]}/{gpu.index}",
        "model": gpu.model,
        "utilization": _stats(gpu.stats, Metric.METRIC_UTILIZATION_PERCENT, "%"),
        "memory": _stats(gpu.stats, Metric.METRIC_MEMORY_USED_PERCENT, "%"),
        "temperature": _stats(gpu.stats, Metric.METRIC_TEMPERATURE_CELSIUS, "°C"),
        "power": _stats(gpu.stats, Metric.METRIC_POWER_WATTS, "W"),
        "samples": gpu.sample_count,
    }


def _stats(stats: Sequence[monitor_api.MetricStats], metric: "Metric.ValueType", unit: str) -> str:
    """`37 % (12 to 88)`."""
    found = next((one for one in stats if one.metric == metric), None)
    if found is None:
        return words.UNKNOWN
    return f"{words.number(found.mean, unit)} ({found.min:.0f} to {found.max:.0f})"
