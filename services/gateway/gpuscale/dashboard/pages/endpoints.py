"""Endpoints: how many replicas each has and wants, and why; the page of one adds signals, decisions and replicas."""

import codecs
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from datetime import UTC, datetime
from functools import partial

from nicegui import ui
from nicegui.events import GenericEventArguments

from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.client import GpuscaleError, NotFoundError
from gpuscale.common.wire import to_datetime
from gpuscale.dashboard import charts, humanize, rows
from gpuscale.dashboard.frame import Chart, DashboardSite, ListTable, Tiles, heading, live, page, reading
from gpuscale.dashboard.visitors import VisitorActions


def endpoints_page(site: DashboardSite) -> None:
    """Build the page."""
    with page(site, "Endpoints"):
        table = ListTable(rows.ENDPOINTS.columns, key="name", links=("name",), empty="no endpoints")
    live(site.facts, lambda: table.show(rows.ENDPOINTS.rows(site.facts.endpoints)))


LOOK, REFRESH = 1.0, 5.0
"""Seconds between checks for a changed endpoint, and between queries of its signals without a change."""
KEPT = 200
"""Decisions shown."""
DECISIONS = {name: heading for name, heading in rows.DECISIONS.columns.items() if name != "endpoint"}


def endpoint_page(site: DashboardSite, endpoint: str) -> None:
    """Build the page of `endpoints/{endpoint}`."""
    name = f"endpoints/{endpoint}"

    def found() -> autoscaler_api.Endpoint | None:
        return next((one for one in site.facts.endpoints if one.name == name), None)

    with page(site, f"Endpoint {endpoint}"):
        head = ui.label(endpoint).classes("text-h6")
        why = ui.label()
        tiles = Tiles("desired", "granted", "starting", "ready", "draining", "min to max")
        endpoint_acts(site, found)
        with ui.column().classes("full-width") as body:
            with ui.element("div").classes("gs-charts"):
                counts = Chart(charts.scaling(autoscaler_api.Endpoint(), (), datetime.now(UTC)), "replicas")
                read = Chart(charts.signals(()), "signals")
            what_if = WhatIf(site, name)
            heading("Decisions")
            decided = ListTable(DECISIONS, key="name", links=("change",), length=10, empty="no decisions yet")
            with ui.column().classes("full-width") as grouped:
                heading("Capability sets")
                sets = ListTable(rows.CAPABILITY_SETS.columns, key="set", empty="no capability sets")
            heading("Replicas")
            replicas = ListTable(rows.REPLICAS.columns, key="name", links=("name",), empty="no replicas")
    counts.element.on("componentClick", follow, ["data"])

    def show() -> None:
        one = found()
        body.set_visibility(one is not None)
        if one is None:
            why.text = "no such endpoint, or it was deleted"
            tiles.clear()
            return
        head.text = endpoint + (" · paused" if one.spec.paused else "")
        why.text = one.status.summary
        tiles.show(**rows.endpoint_figures(one))
        sets.show(rows.capability_set_rows(one))
        grouped.set_visibility(bool(one.status.capability_sets))
        replicas.show(rows.replica_rows(site.facts, name))

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
        with reading("the decisions", why):
            decisions = (await site.client.decisions.ListDecisions(request)).decisions
            signals = (await site.client.decisions.QuerySignals(asked)).signals
            counts.show(charts.scaling(one, decisions, datetime.now(UTC)))
            read.show(charts.signals(signals))
            what_if.offer(signals)
            decided.show(rows.DECISIONS.rows(decisions))

    live(site.facts, show)
    ui.timer(LOOK, refresh)


def endpoint_acts(site: DashboardSite, found: Callable[[], autoscaler_api.Endpoint | None]) -> None:
    """The buttons of an endpoint."""
    actions = site.actions()
    if actions is None or not actions.may("autoscaler.v1.EndpointService/UpdateEndpoint"):
        return
    known = found() or autoscaler_api.Endpoint()
    groups = [one.id for one in known.spec.capability_sets]
    with ui.row().classes("items-center") as row:
        group = ui.select(groups or [""], value=groups[0] if groups else "", label="capability set")
        group.props("dense").set_visibility(bool(groups))
        # The current number is no order, so that a stray click removes nothing.
        order = ui.number("replicas", value=known.status.desired_replicas, min=0, max=100_000, precision=0)
        order.props("dense").on_value_change(order.sanitize)

        async def ordered() -> None:
            one = found()
            if one is not None and order.value is not None:
                await actions.set_replicas(one, int(order.value), f"{group.value}")

        async def paused() -> None:
            if (one := found()) is not None:
                await actions.pause(one)

        button = ui.button("order", on_click=ordered).props("dense no-caps")
        button.bind_enabled_from(order, "value", lambda number: number is not None)
        pause = ui.button("pause", on_click=paused).props("dense no-caps flat")

    def show() -> None:
        one = found()
        row.set_visibility(one is not None)
        pause.text = "resume" if one is not None and one.spec.paused else "pause"

    live(site.facts, show)


def follow(event: GenericEventArguments) -> None:
    """Open the page that a chart mark links to."""
    if isinstance(event.args["data"], dict) and "to" in event.args["data"]:
        ui.navigate.to(event.args["data"]["to"])


class WhatIf:
    """A slider for each signal of an endpoint, and the replicas it would want at those values."""

    def __init__(self, site: DashboardSite, endpoint: str) -> None:
        self._site = site
        self._endpoint = endpoint
        self._stated: dict[str, float] = {}
        self._offered: set[str] = set()
        self._panel = ui.column().classes("full-width")
        self._panel.set_visibility(False)  # until there is a slider
        with self._panel:
            heading("What if")
            with ui.element("div").classes("gs-panel"):
                self._sliders = ui.element("div").classes("gs-charts")
                self._said = ui.label("move a slider to try values; nothing is changed")
                self._said.props("aria-live=polite")
        self._steps: ListTable | None = None

    def offer(self, signals: Iterable[autoscaler_api.SignalHistory]) -> None:
        """Add a slider, from 0 to twice the value read, for each signal without one."""
        for one in signals:
            read = [sample.value for sample in one.samples if sample.HasField("value")]
            if not read or one.signal in self._offered:
                continue
            self._offered.add(one.signal)
            self._panel.set_visibility(True)
            most = 2 * max(1.0, *read)
            with self._sliders, ui.element("div"):
                shown = ui.label(f"{one.signal}: {read[-1]:g}")
                slider = ui.slider(min=0, max=most, step=most / 200, value=max(0.0, read[-1]))
                slider.props(f'aria-label="{one.signal}"')
                moved = partial(self.moved, one.signal, slider, shown)
                slider.on("update:model-value", moved, throttle=0.2, leading_events=False)

    async def moved(self, signal: str, slider: ui.slider, shown: ui.label) -> None:
        """Show what the endpoint would do at the values of all moved sliders."""
        self._stated[signal] = value = float(slider.value or 0.0)
        shown.text = f"{signal}: {value:g}"
        stated = [autoscaler_api.StatedSignal(signal=one, value=at) for one, at in self._stated.items()]
        request = autoscaler_api.EvaluateRequest(name=self._endpoint, signals=stated)
        try:
            found = await self._site.client.decisions.Evaluate(request)
        except GpuscaleError as error:
            self._said.text = f"cannot evaluate: {error.message}"
            return
        if self._panel.is_deleted:  # the page was left meanwhile
            return
        would = [f"would want {found.decision.wanted}: {found.decision.summary}"]
        would += [f"{one.wanted} if {one.text}" for one in found.alternatives]
        if found.HasField("next_change"):
            wait = humanize.length(found.next_change.wait)
            would.append(f"{found.next_change.wanted} in {wait} if signals stay")
        self._said.text = "; ".join(would)
        if self._steps is None:
            with self._panel:
                self._steps = ListTable(rows.STEPS.columns, key="step", empty="no stages")
        self._steps.show(rows.STEPS.rows(enumerate(found.decision.steps, 1)))


def decision_page(site: DashboardSite, endpoint: str, decision: str) -> None:
    """Build the page of a decision: the signals it saw, and the count after each stage.

    It is read again and again: the newest one still lasts, and an error may pass.
    """
    name = f"endpoints/{endpoint}/decisions/{decision}"
    with page(site, f"Decision of {endpoint}"):
        with ui.row().classes("items-baseline"):
            ui.link(endpoint, f"/endpoints/{endpoint}")
            head = ui.label().classes("text-h6")
        why = ui.label()
        tiles = Tiles("before", "wanted", "granted", "limited by", "times", "lasted")
        heading("What it saw")
        seen = ListTable(rows.OBSERVATIONS.columns, key="signal", empty="no signals")
        heading("Stages")
        steps = ListTable(rows.STEPS.columns, key="step", empty="no stages")

    async def load() -> None:
        with reading("the decision", why):
            request = autoscaler_api.GetDecisionRequest(name=name)
            one = (await site.client.decisions.GetDecision(request)).decision
            head.text = str(rows.DECISIONS.row(one)["change"])
            why.text = one.summary
            tiles.show(
                before=str(one.before),
                wanted=str(one.wanted),
                granted=str(one.granted),
                limited_by=humanize.word(one, "limited_by") if one.limited_by else "nothing",
                times=str(one.count),
                lasted=humanize.ago(one.create_time, to_datetime(one.last_time)),
            )
            seen.show(rows.OBSERVATIONS.rows(one.observations))
            steps.show(rows.STEPS.rows(enumerate(one.steps, 1)))

    ui.timer(REFRESH, load)


_LOG_PART, _LOG_PARTS = 262_144, 1024
LOG_PERIOD = 1.0
"""Seconds between reads of a log."""
LOG_LINES = 2_000
"""Most lines of a log on a page."""


def replica_page(site: DashboardSite, endpoint: str, replica: str) -> None:
    """Build the page of a replica: its log, for signed-in visitors only, since it may hold secrets."""
    name = f"endpoints/{endpoint}/replicas/{replica}"
    with page(site, f"Replica {replica}"):
        with ui.row().classes("items-baseline"):
            ui.link(endpoint, f"/endpoints/{endpoint}")
            ui.label(replica).classes("text-h6")
        note = ui.label(f"gpuscalectl logs {endpoint}/{replica}").classes("gs-quiet")
        whole = ui.link("view or save the full log", f"/{name}/log", new_tab=True)
        log = ui.log(max_lines=LOG_LINES).classes("gs-log").props(f'tabindex=0 role=log aria-label="{name}"')
    actions = site.actions()
    whole.set_visibility(actions is not None and actions.may("autoscaler.v1.EndpointService/ReadReplicaLog"))
    if actions is None:
        note.text = f"sign in to see the log, or run: gpuscalectl logs {endpoint}/{replica}"
        return
    request = autoscaler_api.ReadReplicaLogRequest(name=name)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    rest = ""

    async def read() -> None:
        nonlocal rest
        try:
            found = await actions.ask(lambda client: client.endpoints.ReadReplicaLog(request))
        except GpuscaleError as error:
            note.text = f"cannot read the log: {error.message}"
            timer.active = not isinstance(error, NotFoundError)
            return
        *lines, rest = (rest + decoder.decode(found.content)).split("\n")
        for line in lines[-LOG_LINES:]:
            log.push(line)
        request.offset = found.next_offset
        ended = found.ended and not found.content
        timer.active = not ended
        note.text = "it has ended" if ended else "new lines appear here"

    timer = ui.timer(LOG_PERIOD, read)


async def whole_log(actions: VisitorActions, name: str) -> AsyncIterator[bytes]:
    """The log of a replica, as far as it is kept. Raises GpuscaleError: it cannot be read; a later failure is written into the text."""
    request = autoscaler_api.ReadReplicaLogRequest(name=name, offset=0, max_bytes=_LOG_PART)
    first = await actions.ask(lambda client: client.endpoints.ReadReplicaLog(request))

    async def parts() -> AsyncIterator[bytes]:
        found = first
        try:
            for _ in range(_LOG_PARTS):
                if not found.content:
                    break
                yield found.content
                request.offset = found.next_offset
                found = await actions.ask(lambda client: client.endpoints.ReadReplicaLog(request))
        except GpuscaleError as error:
            yield f"\n(cannot read the rest: {error.message})\n".encode()

    return parts()
