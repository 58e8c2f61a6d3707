"""The fleet: a map of all GPUs by what they read, figures, and a table to search."""

from collections.abc import Callable
from dataclasses import dataclass

from nicegui import ui

from gpuscale.dashboard import charts, rows
from gpuscale.dashboard.facts import GpuFacts
from gpuscale.dashboard.frame import Chart, Site, Table, Tiles, live, page

SHOWN = 200
"""Rows of the table; the filter finds the others."""
TALLEST = 900
"""Pixels of the map, at most."""


@dataclass(frozen=True)
class Reading:
    """What the map shows: a value of a GPU, its unit, and the value of the last colour."""

    value: Callable[[GpuFacts], float | None]
    unit: str
    top: float


READINGS = {
    "utilization": Reading(lambda gpu: gpu.utilization, "%", 100.0),
    "memory": Reading(lambda gpu: gpu.memory_percent, "%", 100.0),
    "temperature": Reading(lambda gpu: gpu.temperature, "°C", 100.0),
    "power": Reading(lambda gpu: gpu.power_percent, "% of limit", 100.0),
    "reserved": Reading(lambda gpu: gpu.held_milli / 10.0, "%", 100.0),
}


def build(site: Site) -> None:
    """Make the page."""
    with page(site, "Fleet"):
        tiles = Tiles("nodes online", "GPUs", "reserved", "mean utilization", "memory in use", "power")
        with ui.row().classes("items-center w-full"):
            chosen = ui.toggle(list(READINGS), value="utilization").props("dense no-caps")
            ui.space()
            wanted = ui.input(placeholder="filter: node, model, state, holder").props("dense clearable")
        heat = Chart(charts.map_of((), READINGS["utilization"].value, "%", 100.0), mark="map")
        table = Table(rows.GPUS, key="uuid", links=("gpu",), empty="no GPU is known, or none matches")

    def draw() -> None:
        text = str(wanted.value or "")
        found = [(gpu, row) for gpu in site.facts.gpus() if rows.matches(row := rows.gpu_row(gpu), text)]
        gpus = [gpu for gpu, _ in found]
        reading = READINGS[str(chosen.value)]
        lines = len({gpu.node for gpu in gpus}) + len(gpus) // charts.LONGEST_ROW
        height = min(TALLEST, 90 + 26 * max(2, lines))
        heat.show(charts.map_of(gpus, reading.value, reading.unit, reading.top), height=height)
        table.show([row for _, row in found[:SHOWN]])
        tiles.show(**rows.fleet_figures(list(site.facts.nodes.values()), gpus))

    live(site.facts, draw)
    chosen.on_value_change(draw)
    wanted.on_value_change(draw)
