"""What all pages share: the header, charts, tables, tiles, and refreshing."""

import json
import time
from collections.abc import Awaitable, Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import TypeVar
from urllib.parse import urlencode

from nicegui import ui
from nicegui.elements.mixins.text_element import TextElement
from nicegui.events import GenericEventArguments

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.client import AsyncClient, GpuscaleError
from gpuscale.common.wire import to_duration
from gpuscale.dashboard.charts import NIGHT, Options
from gpuscale.dashboard.facts import Facts
from gpuscale.dashboard.feed import CONNECTING, LINGER
from gpuscale.dashboard.rows import GPUS, Columns, Row, ordered
from gpuscale.dashboard.visitors import VisitorActions

T = TypeVar("T")

LOOK = 0.25
"""Seconds between a page's checks for changes."""
DRAW = 0.9
"""Least seconds between redraws of a page."""
LINKS = (
    ("Fleet", "/"),
    ("Over time", "/time"),
    ("Reservations", "/reservations"),
    ("Bookings", "/bookings"),
    ("Policies", "/policies"),
    ("Usage", "/usage"),
    ("Endpoints", "/endpoints"),
    ("Recordings", "/recordings"),
    ("Health", "/health"),
    ("Audit", "/audit"),
)


def _asset(name: str) -> str:
    return files("gpuscale.dashboard").joinpath("assets", name).read_text(encoding="utf-8")


_STYLE = _asset("pages.css")
_TO_SIGN_IN = f"<script>{_asset('sign_in.js')}</script>"
_SCRIPT = f"<script>const NIGHT = {json.dumps(dict(NIGHT))};\n{_asset('pages.js')}</script>"


def per_version(facts: Facts, make: Callable[[], T]) -> Callable[[], T]:
    """A value that many pages draw from, computed once per version of the facts, for all visitors."""

    @lru_cache(maxsize=1)
    def made(_version: int) -> T:
        return make()

    return lambda: made(facts.version)


@dataclass
class DashboardSite:
    """What every page has access to."""

    facts: Facts  # the state of the services
    client: AsyncClient  # for data that only one page needs
    address: str  # address of the gateway
    actions: Callable[[], VisitorActions | None]  # acts for the visitor of the page; None if no one signed in
    look: Callable[[], None]  # says that someone is looking
    calendar: Callable[[], str] = str  # the secret in the address of the calendar; empty if there is none

    def __post_init__(self) -> None:
        self.gpus = per_version(self.facts, self.facts.gpus)
        self.gpu_rows = per_version(self.facts, lambda: GPUS.rows(self.gpus()))

    async def ask(self, actions: VisitorActions | None, act: Callable[[AsyncClient], Awaitable[T]]) -> T:
        """Call the gateway as the visitor; as the dashboard itself if no one signed in."""
        return await (act(self.client) if actions is None else actions.ask(act))


@contextmanager
def page(site: DashboardSite, title: str) -> Generator[None]:
    """A page with the common header; the block builds its body."""
    ui.page_title(f"{title} · gpuscale")
    ui.add_css(_STYLE)
    ui.add_head_html(_SCRIPT)
    ui.colors(primary="#1f5f7a")
    with ui.header(elevated=False).classes("items-center q-py-xs").style("gap: 4px 16px; flex-wrap: wrap"):
        ui.label("gpuscale").classes("text-bold")
        for text, target in LINKS:
            here = text == title
            link = ui.link(text, target).classes(f"text-white {'text-bold' if here else ''}")
            link.style("text-decoration: none").props("aria-current=page" if here else "")
        ui.space()
        ui.label(f"{site.address} ·").classes("text-caption gs-address").style("margin-right: -12px")
        badge = ui.label().props("aria-live=polite").classes("text-caption")
        ui.element("span").classes("text-caption").props[":textContent"] = "'times: ' + ZONE"
        actions = site.actions()
        if actions is not None:
            ui.add_head_html(_TO_SIGN_IN)
            ui.html('<form method="post" action="/sign-out"><button>sign out</button></form>', sanitize=False)
    with ui.column().classes("gs-page") as body:
        heading(title, "h1").classes("gs-hidden")
        warning = ui.label().classes("text-negative gs-line")
        yield

    client = ui.context.client

    def show() -> None:
        if actions is not None and actions.signed_out:
            ui.navigate.to("/sign-in")
            client.remove_all_elements()  # and its timers
            return
        problems = site.facts.problems
        lost = "connection lost" if {*problems.values()} - {CONNECTING} else CONNECTING
        badge.text = lost if problems else "live"
        warning.text = "; ".join(site.facts.wrong)
        warning.set_visibility(bool(warning.text))
        body.classes(add="gs-stale") if problems else body.classes(remove="gs-stale")

    live(site.facts, show)
    site.look()
    ui.timer(LINGER / 2, site.look)


def heading(text: str, level: str = "h2") -> TextElement:
    """A heading."""
    return TextElement(tag=level, text=text).classes("text-subtitle1")


class PageAddress:
    """A visitor's choices on a page, kept in its URL, so that a link shows the same."""

    def __init__(self) -> None:
        request = ui.context.client.request
        self._path, self._asked = request.url.path, request.query_params
        self._kept: dict[str, tuple[ui.toggle | ui.input, str]] = {}

    def choice(self, name: str, options: Collection[str], default: str) -> ui.toggle:
        """A choice of words."""
        asked = self._asked.get(name, default)
        toggle = ui.toggle(list(options), value=asked if asked in options else default)
        self._keep(name, toggle.props(f"dense no-caps aria-label={name}"), default)
        return toggle

    def text(self, name: str, hint: str = "") -> ui.input:
        """A line of text."""
        line = ui.input(placeholder=hint, value=self._asked.get(name, ""))
        line.style("width: 17rem" if hint else "")
        self._keep(name, line.props(f"dense clearable aria-label={name}"), "")
        return line

    def span(self, spans: Mapping[str, float], default: str) -> "TimeSpan":
        """A choice of how far back, or between which two moments."""
        with ui.row().classes("items-center"):
            choice = self.choice("span", spans, default)
            found = TimeSpan(spans, choice, self.text("from"), self.text("until"))
            ui.button("until now", on_click=found.until_now).props("dense no-caps flat").bind_visibility_from(
                found.start, "value"
            )
        return found

    def _keep(self, name: str, element: ui.toggle | ui.input, default: str) -> None:
        self._kept[name] = (element, default)
        element.on_value_change(self._say)

    def _say(self) -> None:
        chosen = {name: str(element.value or "") for name, (element, _) in self._kept.items()}
        query = urlencode({name: value for name, value in chosen.items() if value != self._kept[name][1]})
        ui.navigate.history.replace(f"{self._path}?{query}".removesuffix("?"))


class TimeSpan:
    """A span of time that ends now, or one drawn on a chart: then `start` and `end` are in milliseconds."""

    def __init__(self, spans: Mapping[str, float], choice: ui.toggle, start: ui.input, end: ui.input) -> None:
        self.start, self.end, self._spans, self._choice = start, end, spans, choice
        for one in (start, end):
            one.set_visibility(False)
        choice.on_value_change(self.until_now)

    def asked(self) -> tuple[monitor_api.HistorySpan, float]:
        """The span to query, and its length in seconds."""
        with suppress(ValueError):  # nothing is drawn
            start, end = (int(one.value or "") for one in (self.start, self.end))
            if 0 < start < end:
                span = monitor_api.HistorySpan()
                span.start_time.FromMilliseconds(start)
                span.end_time.FromMilliseconds(end)
                return span, (end - start) / 1000
        length = self._spans[str(self._choice.value)]
        return monitor_api.HistorySpan(last=to_duration(length)), length

    def until_now(self) -> None:
        """End the span now again."""
        self.end.value = self.start.value = ""

    def drawn_on(self, chart: "Chart", moments: Callable[[], Sequence[float]] = tuple) -> None:
        """Follow the span that a visitor draws on a chart; `moments` are the times of its columns, if it has any."""

        def take(event: GenericEventArguments) -> None:
            areas: list[dict[str, list[float]]] = event.args["areas"]
            for area in areas[:1]:
                start, end = sorted(area["coordRange"])
                if at := moments():
                    first, last = (min(max(round(one), 0), len(at) - 1) for one in (start, end))
                    start, end = at[first], at[last] + at[min(1, len(at) - 1)] - at[0]
                self.end.value, self.start.value = f"{end:.0f}", f"{start:.0f}"

        chart.element.on("chart:brushEnd", take, ["areas"])
        chart.element.on(
            "chart:finished", js_handler=f"() => brushable(getElement({chart.element.id}).chart)"
        )


@contextmanager
def reading(what: str, note: ui.label) -> Generator[None]:
    """Say in `note` that `what` cannot be read, if a call in the block fails."""
    try:
        yield
    except GpuscaleError as error:
        note.text = f"cannot read {what}: {error.message}"


def live(facts: Facts, draw: Callable[[], None]) -> None:
    """Draw now, and again after each change, at most every DRAW seconds."""
    drawn, at = facts.version, time.monotonic()
    draw()

    def look() -> None:
        nonlocal drawn, at
        now = time.monotonic()
        if drawn != facts.version and now - at >= DRAW:
            drawn, at = facts.version, now
            draw()

    ui.timer(LOOK, look)


class Chart:
    """An ECharts chart in a panel; screen readers read out `label`."""

    def __init__(self, options: Options, label: str) -> None:
        self.element = ui.echart(dict(options)).classes("gs-panel")
        self.element.props["role"], self.element.props["aria-label"] = "img", label
        self._shown = options
        self._height = 0

    def show(self, options: Options, *, height: int = 0) -> None:
        """Draw these options, `height` pixels high; nothing is sent if they are unchanged."""
        if height and height != self._height:
            self._height = height
            self.element.style(f"height: {height}px")
        if options != self._shown:
            self._shown = options
            # NiceGUI states no types of keys and values.
            self.element.options.update(options)  # pyright: ignore[reportUnknownMemberType]


class Tiles:
    """Figures in a row, each above its name."""

    def __init__(self, *words: str) -> None:
        self._numbers: dict[str, ui.label] = {}
        with ui.element("div").classes("gs-tiles"):
            for word in words:
                with ui.element("div").classes("gs-tile"):
                    self._numbers[word] = ui.label("-").classes("gs-number")
                    ui.label(word).classes("gs-quiet")

    def clear(self) -> None:
        """Show that nothing is known any more."""
        for label in self._numbers.values():
            label.text = "-"

    def show(self, **numbers: str) -> None:
        """Set figures by name, with `_` for a blank."""
        for word, number in numbers.items():
            self._numbers[word.replace("_", " ")].text = number


ACT = "act"
"""The column of buttons."""
LENGTH = 50
"""Rows per page of a table."""
TIMES = frozenset({"time", "start", "end"})
"""Columns of times (`humanize.clock`): shown in the browser's zone, with UTC as tooltip."""
PROSE = frozenset({"why", "notes", "note", "message", "reason", "description", "stages", "problem"})
"""Columns of sentences, which wrap; other long texts are cut, with the full text as tooltip."""
_HEAD = """<q-th :props="props" :tabindex="props.col.sortable ? 0 : undefined" @keydown.enter="props.sort(props.col)">
{{ props.col.label }}</q-th>"""
_CELL = '<q-td :props="props" :title="props.value">{{ props.value }}</q-td>'
_TIME_CELL = """<q-td class="gs-time" :props="props" :title="props.value + ' UTC'">
{{ props.value === '-' ? '-' : new Date(props.value.replace(' ', 'T') + 'Z').toLocaleString('sv-SE') }}</q-td>"""


class ListTable:
    """A table whose rows are identified by a key. Cells of `links` columns lead to the page in the row's `{column}_to`."""

    def __init__(
        self, columns: Columns, *, key: str, links: Sequence[str] = (), empty: str, length: int = LENGTH
    ) -> None:
        self._rows: Sequence[Row] = ()
        self._shown: tuple[object, ...] = ()
        self._key = key
        self._length = length
        self._page = 1
        self._column = ""
        self._descending = False
        heads = [
            {
                "name": name,
                "label": label.removesuffix(" (UTC)"),
                "field": name,
                "align": "left",
                "sortable": name != ACT,
                "classes": "gs-prose" if name in PROSE else "",
            }
            for name, label in columns.items()
        ]
        with ui.element("div").classes("gs-panel"):
            # A row count makes the browser ask for pages and orders; without one it would page through what it has.
            self.element = ui.table(
                columns=heads,
                rows=[],
                row_key=key,
                pagination=self._pagination(),
                on_pagination_change=self._keep,
            )
        self.element.classes("full-width").props("flat dense")
        self.element.add_slot("no-data", empty)  # no warning sign
        self.element.props["rows-per-page-options"] = [length]
        self.element.on("request", self._asked, ["pagination"])
        self.element.add_slot("header-cell", _HEAD)
        self.element.add_slot("body-cell", _CELL)
        for name in TIMES & columns.keys():
            self.element.add_slot(f"body-cell-{name}", _TIME_CELL)
        for name in links:
            self.element.add_slot(
                f"body-cell-{name}",
                f'<q-td :props="props" :title="props.value"><a v-if="props.row.{name}_to" class="text-primary" '
                f':href="props.row.{name}_to">{{{{ props.value }}}}</a><template v-else>{{{{ props.value }}}}</template></q-td>',
            )

    def add_acts(self, act: Callable[[str, str], Awaitable[None]]) -> None:
        """Show a button for each word in column ACT; `act` gets the row's key and the word."""
        self.element.add_slot(
            f"body-cell-{ACT}",
            '<q-td :props="props"><q-btn v-for="one in props.value" :key="one" dense flat no-caps size="12px" '
            f""":label="one" @click="() => $parent.$emit('act', [props.row['{self._key}'], one])" /></q-td>""",
        )

        async def acted(event: GenericEventArguments) -> None:
            await act(str(event.args[0]), str(event.args[1]))

        self.element.on("act", acted)

    def show(self, rows: Sequence[Row]) -> None:
        """Show these rows, by the visitor's page and order; nothing is sent if that is unchanged."""
        self._rows = rows
        self._draw()

    def _asked(self, event: GenericEventArguments) -> None:
        asked = event.args["pagination"]
        self._page = int(asked.get("page") or 1)
        self._column = str(asked.get("sortBy") or "")
        self._descending = bool(asked.get("descending"))
        self._draw()

    def _keep(self) -> None:
        """Keep our pagination: what a browser sends when it is ready may be out of date."""
        self.element.pagination = self._pagination()

    def _draw(self) -> None:
        rows = self._rows
        if self._column:
            rows = ordered(rows, self._column, descending=self._descending)
        pages = max(1, -(-len(rows) // self._length))
        self._page = min(self._page, pages)
        page = list(rows[(self._page - 1) * self._length : self._page * self._length])
        shown = (page, self._page, self._column, self._descending, len(rows))
        if shown == self._shown:
            return
        self._shown = shown
        self.element.pagination = self._pagination()
        self.element.props.set_bool("hide-pagination", pages == 1)
        self.element.rows = [dict(row) for row in page]

    def _pagination(self) -> dict[str, object]:
        """The pagination as Quasar expects it."""
        return {
            "page": self._page,
            "rowsPerPage": self._length,
            "rowsNumber": len(self._rows),
            "sortBy": self._column or None,
            "descending": self._descending,
        }
