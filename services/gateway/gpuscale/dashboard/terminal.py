"""The same in a terminal: `gpuscalectl top`, made with Textual."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, HelpPanel, Input, Static, TabbedContent, TabPane

from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.client import AsyncClient, GpuscaleError
from gpuscale.dashboard import rows
from gpuscale.dashboard.facts import Facts
from gpuscale.dashboard.feed import LINGER, Feed
from gpuscale.dashboard.readings import PROCESSES, process_rows
from gpuscale.dashboard.rows import Columns, Row

LOOK = 0.5
"""Seconds between two looks at what changed."""
KEPT = 400
"""Points of the line of the mean utilization."""
SHOWN = 1_000
"""Rows of a table; the filter finds the others."""
BLOCKS = " ▁▂▃▄▅▆▇█"
LATEST = 100
"""Decisions that are shown."""
BAR = 10
"""Characters of a bar."""
LEVELS = ((85.0, "red"), (50.0, "yellow"), (0.0, "green"))
"""From how many percent on a bar has a colour."""
TABLES: dict[str, Columns] = {
    # What fits 80 columns first: how busy it is, and who holds it.
    "gpus": {
        **{name: rows.GPUS[name] for name in ("gpu", "state", "util", "held", "memory")},
        **{name: rows.GPUS[name] for name in ("temperature", "power", "model")},
        "why": "why",
    },
    "reservations": rows.RESERVATIONS,
    "endpoints": rows.ENDPOINTS,
    "decisions": rows.DECISIONS,
    "health": rows.HEALTH,
    "processes": {"gpu": "GPU"}
    | {name: PROCESSES[name] for name in ("user", "used", "memory", "program", "pid", "reservation")},
}


def load_lines(percents: Sequence[float]) -> tuple[str, str]:
    """A bar for each, from 0 to 100 percent, two characters high: the upper and the lower line."""
    eighths = [round(min(max(one, 0.0), 100.0) * 0.16) for one in percents]
    upper = "".join(BLOCKS[max(one - 8, 0)] for one in eighths)
    return upper, "".join(BLOCKS[min(one, 8)] for one in eighths)


class Top(App[None]):
    """The whole fleet on one screen.

    Args:
        connect: makes the client of the gateway.
        ascii_only: draw nothing but ASCII.
    """

    CSS = """
    Screen { overflow: hidden; }
    TabbedContent, TabPane, ContentSwitcher { height: 1fr; padding: 0; }
    #head { height: 1; padding: 0 1; }
    #load { height: 2; margin: 0 1; }
    #problem { height: auto; padding: 0 1; color: $error; display: none; }
    #filter { display: none; }
    DataTable { height: 1fr; }
    """
    TITLE = "gpuscale"
    ENABLE_COMMAND_PALETTE = False
    AUTO_FOCUS = "#table-gpus"
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(number), f"show('{name}')", name, show=False) for number, name in enumerate(TABLES, 1)),
        Binding("s", "sort", "sort by next"),
        Binding("r", "reverse", "reverse"),
        Binding("slash", "filter", "filter"),
        Binding("p,space", "pause", "pause"),
        Binding("escape", "clear", "clear", show=False),
        Binding("question_mark", "keys", "keys"),
        Binding("q", "quit", "quit"),
    ]

    def __init__(self, connect: Callable[[], AsyncClient], *, ascii_only: bool = False) -> None:
        super().__init__()
        self._connect = connect
        self._ascii = ascii_only
        self._facts = Facts()
        self._stack = AsyncExitStack()
        self._client: AsyncClient | None = None
        self._tables: dict[str, DataTable[Text]] = {}
        self._decisions: Sequence[autoscaler_api.Decision] = ()
        self._asked: object = None
        self._load: deque[float] = deque(maxlen=KEPT)
        self._sorted: dict[str, tuple[int, bool]] = {}
        self._shown: dict[str, list[tuple[str, ...]]] = {}
        self._drawn = -1
        self._paused = False

    def compose(self) -> ComposeResult:
        """The widgets."""
        yield Static(id="head")
        yield Static(id="problem", markup=False)
        if not self._ascii:
            yield Static(id="load", markup=False)
        with TabbedContent(id="tabs"):
            for number, name in enumerate(TABLES, 1):
                self._tables[name] = DataTable(id=f"table-{name}", cursor_type="row", zebra_stripes=True)
                with TabPane(f"{number} {name}", id=name):
                    yield self._tables[name]
        # Disabled while it is not shown, so that no key goes there.
        yield Input(placeholder="words that a row must show; Esc to clear", id="filter", disabled=True)
        yield Footer()

    async def on_mount(self) -> None:
        """Connect, and begin to look."""
        for name, columns in TABLES.items():
            self._tables[name].add_columns(*columns.values())
        self._client = await self._stack.enter_async_context(self._connect())
        feed = Feed(self._client, self._facts)
        await self._stack.enter_async_context(feed.running())
        feed.look()
        self.set_interval(LINGER / 2, feed.look)
        self.set_interval(LOOK, self._look)
        self.set_interval(2 * LOOK, self._ask)

    async def on_unmount(self) -> None:
        """End the feed, and close the client."""
        await self._stack.aclose()

    def action_show(self, name: str) -> None:
        """Go to a table."""
        self.query_one("#tabs", TabbedContent).active = name
        self._tables[name].focus()
        self._redraw()

    def action_sort(self) -> None:
        """Sort by the next column; after the last one, as it came."""
        name = self._active
        column, reverse = self._sorted.get(name, (-1, False))
        self._sorted[name] = (column + 1 if column + 1 < len(TABLES[name]) else -1, reverse)
        self._redraw()

    def action_reverse(self) -> None:
        """Turn the order around."""
        column, reverse = self._sorted.get(self._active, (-1, False))
        self._sorted[self._active] = (column, not reverse)
        self._redraw()

    def action_pause(self) -> None:
        """Stop, or go on: the screen stays as it is, for reading."""
        self._paused = not self._paused
        self._redraw()

    def action_keys(self) -> None:
        """Show all keys beside the tables, or not any more."""
        if self.screen.query(HelpPanel):
            self.action_hide_help_panel()
        else:
            self.action_show_help_panel()

    def action_filter(self) -> None:
        """Ask for words."""
        field = self.query_one("#filter", Input)
        field.display, field.disabled = True, False
        field.focus()

    def action_clear(self) -> None:
        """Show all rows again."""
        field = self.query_one("#filter", Input)
        field.value = ""
        field.display, field.disabled = False, True
        self._tables[self._active].focus()

    def on_input_changed(self) -> None:
        """The words changed."""
        self._redraw()

    def on_input_submitted(self) -> None:
        """Back to the table."""
        self._tables[self._active].focus()

    def on_tabbed_content_tab_activated(self) -> None:
        """Another table is looked at."""
        self._redraw()

    @property
    def _active(self) -> str:
        return self.query_one("#tabs", TabbedContent).active or next(iter(TABLES))

    async def _ask(self) -> None:
        """Ask for the decisions while they are looked at, whenever an endpoint changed, which tells of its newest."""
        known = self._facts.endpoints
        if self._paused or self._active != "decisions" or self._client is None or self._asked is known:
            return
        request = autoscaler_api.ListDecisionsRequest(page_size=LATEST)
        try:
            self._decisions = (await self._client.decisions.ListDecisions(request)).decisions
        except GpuscaleError as error:
            self._facts.lost("decisions", error.message)
        else:
            self._asked = known
            self._facts.heard("decisions")
            self._facts.changed()

    def _look(self) -> None:
        if self._drawn != self._facts.version and not self._paused:
            self._redraw()

    def _redraw(self) -> None:
        facts = self._facts
        self._drawn = facts.version
        gpus = facts.gpus()
        figures = rows.fleet_figures(list(facts.nodes.values()), gpus)
        load = rows.mean(gpu.utilization for gpu in gpus)
        words = "  ".join(f"{figure} {word.replace('_', ' ')}" for word, figure in figures.items())
        self.query_one("#head", Static).update(("PAUSED  " if self._paused else "") + words)
        problem = self.query_one("#problem", Static)
        problem.update("; ".join(f"{source}: {text}" for source, text in sorted(facts.problems.items())))
        problem.display = bool(facts.problems)
        if load is not None and not self._paused and not self._ascii:
            self._load.append(load)
            line = self.query_one("#load", Static)
            line.update("\n".join(load_lines([*self._load][-line.size.width or KEPT :])))
        self._fill(self._active)

    def _rows(self, name: str) -> list[Row]:
        facts, now = self._facts, datetime.now(UTC)
        if name == "gpus":
            found = [rows.gpu_row(gpu) for gpu in facts.gpus()]
            states = [str(row["state"]).partition(": ") for row in found]
            return [{**row, "state": at[0], "why": at[2]} for row, at in zip(found, states, strict=True)]
        if name == "processes":
            return [
                {**row, "gpu": f"{node.name.partition('/')[2]}/{gpu.index}"}
                for node in facts.nodes.values()
                for gpu in node.snapshot.gpus
                for row in process_rows(gpu.reading.processes)
            ]
        if name == "reservations":
            by_uuid = {gpu.uuid: gpu for gpu in facts.gpus()}
            return [rows.reservation_row(one, by_uuid, now) for one in facts.reservations]
        if name == "endpoints":
            return [rows.endpoint_row(one) for one in facts.endpoints]
        if name == "decisions":
            return [rows.decision_row(one) for one in self._decisions]
        return rows.health_rows(facts.events, now)

    def _bar(self, cell: str) -> Text:
        """`█████      52 %`, in the colour of its level; what is not known as it is."""
        percent, unit, _ = cell.partition(" %")
        if not unit:
            return Text(cell)
        share = float(percent)
        full = ("|" if self._ascii else "█") * round(min(share, 100.0) * BAR / 100)
        colour = next((one for least, one in LEVELS if share >= least), "")
        return Text.assemble((full.ljust(BAR), colour), f"{percent:>4} %")

    def _fill(self, name: str) -> None:
        """Show the rows of a table; the cursor stays where it is, and nothing is drawn where nothing changed."""
        text = self.query_one("#filter", Input).value
        cells = [
            tuple(str(row[column]) for column in TABLES[name])
            for row in self._rows(name)
            if rows.matches(row, text)
        ]
        if self._ascii:
            cells = [
                tuple(cell.replace("→", "->").encode("ascii", "replace").decode() for cell in row)
                for row in cells
            ]
        column, reverse = self._sorted.get(name, (-1, False))
        if column >= 0:
            cells.sort(key=lambda row: rows.sort_key(row[column]))
        if reverse:
            cells.reverse()
        cells = cells[:SHOWN]
        if cells == self._shown.get(name):
            return
        self._shown[name] = cells
        table = self._tables[name]
        cursor = table.cursor_row
        table.clear()
        # As they are: a table would take `[...]` in a plain string for markup, and a holder writes what it likes.
        bars = "util" in TABLES[name]
        at = [*TABLES[name]].index("util") if bars else -1
        table.add_rows(
            [self._bar(cell) if bars and column == at else Text(cell) for column, cell in enumerate(row)]
            for row in cells
        )
        table.move_cursor(row=min(cursor, max(0, len(cells) - 1)), animate=False)
