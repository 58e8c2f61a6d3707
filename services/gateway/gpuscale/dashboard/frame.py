"""What all pages share: the head with its links and the state of the connection, tables, and looking again."""

from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from nicegui import ui
from nicegui.events import GenericEventArguments

from gpuscale.client import AsyncClient
from gpuscale.dashboard.acting import Hands
from gpuscale.dashboard.charts import Options
from gpuscale.dashboard.facts import Facts
from gpuscale.dashboard.rows import Columns, Row

LOOK = 0.5
"""Seconds between two looks of a page at what changed."""
LINKS = (
    ("Fleet", "/"),
    ("Reservations", "/reservations"),
    ("Endpoints", "/endpoints"),
    ("Recordings", "/recordings"),
    ("Health", "/health"),
)
ACT = "act"
"""The column of buttons."""
_STYLE = """
.gs-page { width: 100%; max-width: 1500px; margin: 0 auto; padding: 12px; gap: 12px; }
.gs-tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; width: 100%; }
.gs-charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 12px; width: 100%; }
.gs-tile { padding: 10px 14px; border: 1px solid rgba(128,128,128,.25); border-radius: 8px; }
.gs-tile .gs-number { font-size: 1.6rem; font-weight: 600; line-height: 1.2; font-variant-numeric: tabular-nums; }
.gs-quiet { opacity: .7; font-size: .8rem; }
.gs-panel { width: 100%; padding: 10px 14px; border: 1px solid rgba(128,128,128,.25); border-radius: 8px; overflow-x: auto; }
.q-table td { font-variant-numeric: tabular-nums; }
"""


@dataclass(frozen=True)
class Site:
    """What every page works with.

    Attributes:
        facts: what is known.
        client: for what is asked only while a page shows it.
        address: of the gateway.
        hands: acts for whoever opens the page; None where nobody signed in.
    """

    facts: Facts
    client: AsyncClient
    address: str
    hands: Callable[[], Hands | None]


@contextmanager
def page(site: Site, title: str) -> Generator[None]:
    """A page with the head that all have; what the block makes is its body."""
    ui.page_title(f"{title} · gpuscale")
    ui.add_css(_STYLE)
    ui.colors(primary="#1f5f7a")
    with ui.header(elevated=False).classes("items-center q-py-xs").style("gap: 4px 16px; flex-wrap: wrap"):
        ui.label("gpuscale").classes("text-bold")
        for text, target in LINKS:
            weight = "text-bold" if text == title else ""
            ui.link(text, target).classes(f"text-white {weight}").style("text-decoration: none")
        ui.space()
        badge = ui.label().props("aria-live=polite").classes("text-caption")
        if site.hands() is not None:
            ui.html('<form method="post" action="/sign-out"><button>sign out</button></form>', sanitize=False)
    with ui.column().classes("gs-page"):
        warning = ui.label().classes("text-negative").mark("problem")
        yield

    def show() -> None:
        problems = site.facts.problems
        badge.text = f"{site.address} · " + ("live" if not problems else "connection lost")
        warning.text = "; ".join(f"{source}: {problem}" for source, problem in sorted(problems.items()))
        warning.set_visibility(bool(problems))

    live(site.facts, show)


def live(facts: Facts, draw: Callable[[], None]) -> None:
    """Draw now, and again whenever something changed."""
    drawn = -1

    def look() -> None:
        nonlocal drawn
        if drawn != facts.version:
            drawn = facts.version
            draw()

    look()
    ui.timer(LOOK, look)


class Chart:
    """A chart of ECharts, in a panel."""

    def __init__(self, options: Options, *, mark: str = "") -> None:
        self._element = ui.echart(dict(options)).classes("gs-panel").mark(mark)

    def show(self, options: Options, *, height: int | None = None) -> None:
        """Draw other options, `height` pixels high; the browser changes only what differs."""
        if height is not None:
            self._element.style(f"height: {height}px")
        # NiceGUI states no types of keys and values.
        self._element.options.update(options)  # pyright: ignore[reportUnknownMemberType]


class Tiles:
    """Figures in a row, each with a word below."""

    def __init__(self, *words: str) -> None:
        self._numbers: dict[str, ui.label] = {}
        with ui.element("div").classes("gs-tiles"):
            for word in words:
                with ui.element("div").classes("gs-tile"):
                    self._numbers[word] = ui.label("-").classes("gs-number").mark(f"tile-{word}")
                    ui.label(word).classes("gs-quiet")

    def show(self, **numbers: str) -> None:
        """Set figures, by word with `_` for a blank."""
        for word, number in numbers.items():
            self._numbers[word.replace("_", " ")].text = number


class Table:
    """Rows under headings, found by a key. Cells of `link` columns lead to the page that the row names in `{column}_to`."""

    def __init__(
        self, columns: Columns, *, key: str, links: Sequence[str] = (), empty: str, length: int = 50
    ) -> None:
        self._shown: list[Row] = []
        self._key = key
        heads = [
            {"name": name, "label": label, "field": name, "align": "left", "sortable": True}
            for name, label in columns.items()
        ]
        with ui.element("div").classes("gs-panel"):
            self.element = ui.table(columns=heads, rows=[], row_key=key, pagination=length).classes("w-full")
        self.element.props(f'flat dense no-data-label="{empty}"')
        for name in links:
            self.element.add_slot(
                f"body-cell-{name}",
                f'<q-td :props="props"><a class="text-primary" :href="props.row.{name}_to">{{{{ props.value }}}}</a></q-td>',
            )

    def add_button(self, text: str, act: Callable[[str], Awaitable[None]]) -> None:
        """A button on each row; `act` gets the key of the row."""
        self.element.add_slot(
            f"body-cell-{ACT}",
            f'<q-td :props="props"><q-btn dense flat no-caps size="sm" label="{text}" '
            """@click="() => $parent.$emit('act', props.row)" /></q-td>""",
        )

        async def acted(event: GenericEventArguments) -> None:
            await act(str(event.args[self._key]))

        self.element.on("act", acted)

    def show(self, rows: Sequence[Row]) -> None:
        """Show these rows; nothing is sent where they are the same."""
        if list(rows) != self._shown:
            self._shown = list(rows)
            self.element.rows = [dict(row) for row in rows]
