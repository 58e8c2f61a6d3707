"""The fleet: a map of all GPUs by what they read, figures, and a table to search."""

from collections.abc import Callable
from dataclasses import dataclass

from nicegui import ui
from nicegui.events import GenericEventArguments

from gpuscale.client.standing import marks
from gpuscale.dashboard import maps, rows
from gpuscale.dashboard.facts import GpuFacts
from gpuscale.dashboard.frame import Chart, Site, Tiles, live, page
from gpuscale.dashboard.tables import Table

FILTER = "filter: node, model, state, holder"


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
        with ui.row().classes("items-center full-width"):
            chosen = ui.toggle(list(READINGS), value="utilization").props("dense no-caps")
            ui.space()
            wanted = ui.input(placeholder=FILTER).props("dense clearable").style("width: 17rem")
        heat = Chart(maps.map_of((), READINGS["utilization"].value, "%", 100.0), mark="map")
        table = Table(rows.GPUS, key="uuid", links=("gpu",), empty="no GPU is known, or none matches")
        nodes = Table(rows.NODES, key="node", empty="no node is known, or none matches")

    def draw() -> None:
        text = str(wanted.value or "")
        gpus, shown = matching(site, text)
        reading = READINGS[str(chosen.value)]
        options = maps.map_of(gpus, reading.value, reading.unit, reading.top)
        heat.show(options, height=90 + 24 * max(2, maps.rows_of(options)))
        table.show(shown)
        nodes.show(node_rows(site, text))
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


def node_rows(site: Site, text: str) -> list[rows.Row]:
    """The rows of nodes that show every word of `text`."""
    facts = site.facts
    marked = marks(facts.cordons)
    found = [rows.node_row(facts.nodes[name], marked) for name in sorted(facts.nodes)]
    return [row for row in found if rows.matches(row, text)]


def matching(site: Site, text: str) -> tuple[list[GpuFacts], list[rows.Row]]:
    """The GPUs whose rows show every word of `text`, and those rows."""
    found = [
        (gpu, row)
        for gpu, row in zip(site.gpus(), site.gpu_rows(), strict=True)
        if not text or rows.matches(row, text)
    ]
    return [gpu for gpu, _ in found], [row for _, row in found]
