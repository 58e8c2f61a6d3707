"""Reservations: who holds what, for how long, and how much of it is used, now and over the last hours."""

import time
from datetime import UTC, datetime

from nicegui import ui

from gpuscale.dashboard import charts, humanize, rows
from gpuscale.dashboard.frame import ACT, Chart, DashboardSite, ListTable, Tiles, live, page

SPANS = {"10 min": 600.0, "1 h": 3600.0, "6 h": 21600.0, "24 h": 86400.0}
REFRESH = 5.0
"""Seconds between two drawings of the chart."""
POINTS = 240
"""Points of the chart, at most about."""


def reservations_page(site: DashboardSite) -> None:
    """Make the page."""
    with page(site, "Reservations"):
        tiles = Tiles("holding", "waiting", "GPUs reserved", "GPUs reserved and idle", "GPU hours unused")
        chosen = ui.toggle(list(SPANS), value="1 h").props("dense no-caps")
        chart = Chart(charts.reserved_and_used(()), mark="waste")
        note = ui.label().classes("gs-quiet")
        actions = site.actions()
        columns = {**rows.RESERVATIONS, "notes": "notes", **({ACT: ""} if actions else {})}
        table = ListTable(columns, key="name", empty="no reservations")
        if actions is not None:

            async def release(name: str) -> None:
                for one in site.facts.reservations:
                    if one.name == f"reservations/{name}":
                        await actions.release(one)

            table.add_button("release", release)

    def draw() -> None:
        gpus, now = site.gpus(), datetime.now(UTC)
        by_uuid = {gpu.uuid: gpu for gpu in gpus}
        table.show([rows.reservation_row(one, by_uuid, now) for one in site.facts.reservations])
        tiles.show(**rows.reservation_figures(site.facts.reservations, gpus))

    def look_back() -> None:
        end = time.time()
        start = end - SPANS[str(chosen.value)]
        counts = site.tally.since(start, end, (end - start) / POINTS)
        chart.show(charts.reserved_and_used(counts))
        tiles.show(GPU_hours_unused=humanize.number(site.tally.wasted_hours(start, end), digits=1))
        since = humanize.moment(counts[0].at) if counts else "now"
        note.text = (
            f"used: reserved GPUs by their utilization; counted by this dashboard, here since {since} UTC"
        )

    live(site.facts, draw)
    look_back()
    ui.timer(REFRESH, look_back)
    chosen.on_value_change(look_back)
