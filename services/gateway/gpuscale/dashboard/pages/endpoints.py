"""Endpoints: how many replicas each has and wants, and why; of one, its signals and decisions, its capability sets and replicas."""

import time
from collections.abc import Collection
from datetime import UTC, datetime

from nicegui import ui

from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.client import GpuscaleError
from gpuscale.dashboard import charts, rows
from gpuscale.dashboard.frame import Chart, DashboardSite, ListTable, Tiles, heading, live, page


def endpoints_page(site: DashboardSite) -> None:
    """Make the page."""
    with page(site, "Endpoints"):
        table = ListTable(rows.ENDPOINTS, key="name", links=("name",), empty="no endpoints")
    live(site.facts, lambda: table.show([rows.endpoint_row(one) for one in site.facts.endpoints]))


LOOK, REFRESH = 1.0, 5.0
"""Seconds between two looks at whether an endpoint changed, and between two questions for what it read where none did."""
KEPT = 200
"""Decisions that are shown."""
DECISIONS = {name: heading for name, heading in rows.DECISIONS.items() if name != "endpoint"}


def endpoint_page(site: DashboardSite, endpoint: str) -> None:
    """Make the page of `endpoints/{endpoint}`."""
    name = f"endpoints/{endpoint}"

    def found() -> autoscaler_api.Endpoint | None:
        return next((one for one in site.facts.endpoints if one.name == name), None)

    with page(site, f"Endpoint {endpoint}"):
        head = ui.label(endpoint).classes("text-h6")
        why = ui.label().mark("why")
        tiles = Tiles("desired", "granted", "starting", "ready", "draining", "min to max")
        actions = site.actions()
        if actions is not None:
            with ui.row().classes("items-center"):
                # What stands there orders nothing, so that a click by mistake takes nothing away.
                known = found()
                desired = None if known is None else known.status.desired_replicas
                order = ui.number("replicas", value=desired, min=0, precision=0).props("dense")

                async def ordered() -> None:
                    one = found()
                    if one is not None and order.value is not None:
                        await actions.set_replicas(one, int(order.value))

                ui.button("order", on_click=ordered).props("dense no-caps")
        with ui.element("div").classes("gs-charts"):
            empty = charts.scaling(autoscaler_api.Endpoint(), (), datetime.now(UTC))
            counts = Chart(empty, "replicas")
            read = Chart(charts.signals(()), "signals")
        heading("Decisions")
        decided = ListTable(DECISIONS, key="name", length=10, empty="no decisions yet")
        with ui.column().classes("full-width") as grouped:
            heading("Capability sets")
            sets = ListTable(rows.CAPABILITY_SETS, key="set", empty="no capability sets")
        heading("Replicas")
        replicas = ListTable(rows.REPLICAS, key="name", empty="no replicas")

    def show() -> None:
        one = found()
        if one is None:
            why.text = "this endpoint does not exist (any more)"
            tiles.clear()
            return
        head.text = endpoint + (" · paused" if one.spec.paused else "")
        why.text = one.status.summary
        tiles.show(**rows.endpoint_figures(one))
        sets.show(rows.capability_set_rows(one))
        grouped.set_visibility(bool(one.status.capability_sets))
        now = datetime.now(UTC)
        replicas.show([rows.replica_row(each, now) for each in site.facts.replicas_of(name)])

    asked_at = 0.0
    asked_of: Collection[autoscaler_api.Endpoint] | None = None

    async def refresh() -> None:
        nonlocal asked_at, asked_of
        one, endpoints = found(), site.facts.endpoints
        if one is None or (asked_of is endpoints and time.monotonic() < asked_at + REFRESH):
            return
        asked_at, asked_of = time.monotonic(), endpoints
        request = autoscaler_api.ListDecisionsRequest(parent=name, page_size=KEPT)
        asked = autoscaler_api.QuerySignalsRequest(name=name)
        try:
            decisions = (await site.client.decisions.ListDecisions(request)).decisions
            signals = (await site.client.decisions.QuerySignals(asked)).signals
        except GpuscaleError as error:
            why.text = f"the decisions cannot be read: {error.message}"
            return
        counts.show(charts.scaling(one, decisions, datetime.now(UTC)))
        read.show(charts.signals(signals))
        decided.show([rows.decision_row(each) for each in decisions])

    live(site.facts, show)
    ui.timer(LOOK, refresh)
