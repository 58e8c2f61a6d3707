"""The dashboard in a terminal: `gpuscalectl top`, built with Textual.

`Grid` draws only the lines that changed: Textual's own table redraws every cell when one changes, which was four fifths of the
work of `top`.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from itertools import groupby, zip_longest
from typing import ClassVar, Literal, TypeAlias

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Footer, Input, Static, TabbedContent, TabPane

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.client import AsyncClient, GpuscaleError
from gpuscale.client.states import marks
from gpuscale.common.names import node_of, short_holder
from gpuscale.dashboard import answers, humanize, rows
from gpuscale.dashboard.answers import Answer, Box, Confirm
from gpuscale.dashboard.facts import Facts, GpuSummary
from gpuscale.dashboard.feed import LINGER, Feed
from gpuscale.dashboard.rows import PROCESSES, Columns, Row

Cells: TypeAlias = tuple[str, ...]
Parts: TypeAlias = Sequence[tuple[str, str]]
"""A cell as drawn: texts, each with the name of its colour, or an empty one."""


class Grid(ScrollView):
    """Rows of text under headings, one of them selected.

    `paint` renders the cell of a column; it must depend on the text alone. `widths` are in characters: columns grow and do not
    shrink.
    """

    class RowChosen(Message):
        """Sent on Enter, or on a click on the selected row."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"grid--head", "grid--even", "grid--odd", "grid--cursor"}
    DEFAULT_CSS = """
    Grid { background: $surface; color: $foreground; }
    Grid > .grid--head { background: $panel; text-style: bold; }
    Grid > .grid--even { background: $surface-lighten-1 50%; }
    Grid > .grid--cursor { background: $block-cursor-blurred-background; }
    Grid:focus > .grid--cursor { background: $block-cursor-background; color: $block-cursor-foreground; text-style: bold; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", show=False),
        Binding("down", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown", "page(1)", show=False),
        Binding("home", "move(-1000000)", show=False),
        Binding("end", "move(1000000)", show=False),
        Binding("enter", "choose", show=False),
    ]

    def __init__(self, headings: Cells, paint: Callable[[int, str], Parts], name: str) -> None:
        super().__init__(id=name)
        self.rows: list[Cells] = []
        self.cursor = 0
        self.widths = [cell_len(heading) for heading in headings]
        self._headings = headings
        self._paint = paint

    def show(self, rows: list[Cells]) -> None:
        """Show these rows; the cursor stays, and only changed lines are drawn."""
        before, self.rows = self.rows, rows
        changed = [at for at, (old, new) in enumerate(zip_longest(before, rows)) if old != new]
        widths = self.widths
        for row in (rows[at] for at in changed if at < len(rows)):
            lengths = (sum(cell_len(text) for text, _ in self._paint(*cell)) for cell in enumerate(row))
            widths = [*map(max, widths, lengths)]
        if len(before) != len(rows) or widths != self.widths:
            self.widths = widths
            self.virtual_size = Size(sum(widths) + 2 * len(widths), 1 + len(rows))
            self.refresh()
            self.select(self.cursor)
            return
        for at in changed:
            self._draw(at)

    def select(self, row: int) -> None:
        """Select that row, or the nearest one, and scroll to it."""
        before, self.cursor = self.cursor, min(max(row, 0), max(0, len(self.rows) - 1))
        if before != self.cursor:
            self._draw(before)
            self._draw(self.cursor)
        first = self.cursor - self._seen + 1
        if not first <= self.scroll_offset.y <= self.cursor:
            self.scroll_to(
                y=self.cursor if self.scroll_offset.y > self.cursor else first, animate=False, force=True
            )

    def action_move(self, rows: int) -> None:
        """Move the cursor down by so many rows."""
        self.select(self.cursor + rows)

    def action_page(self, pages: int) -> None:
        """Move the cursor down by so many pages."""
        self.select(self.cursor + pages * self._seen)

    def action_choose(self) -> None:
        """Choose the selected row."""
        self.post_message(self.RowChosen())

    def on_click(self, event: events.Click) -> None:
        """Select the row under the pointer, or choose it if it is selected."""
        at = event.y + self.scroll_offset.y - 1
        if event.y > 0 and at < len(self.rows):
            self.action_choose() if at == self.cursor else self.select(at)

    def render_line(self, y: int) -> Strip:
        """Draw a visible line: the headings or a row."""
        left, top = self.scroll_offset
        at = y + top - 1 if y else -1
        if at >= len(self.rows):
            return Strip.blank(self.size.width, self.get_component_rich_style("grid--odd"))
        look = "head" if at < 0 else "cursor" if at == self.cursor else "odd" if at % 2 else "even"
        style = self.get_component_rich_style(f"grid--{look}")
        drawn: list[Segment] = []
        for column, width in enumerate(self.widths):
            parts = [(self._headings[column], "")] if at < 0 else self._paint(column, self.rows[at][column])
            drawn += (
                Segment(f" {text}" if first == 0 else text, style + Style.parse(colour) if colour else style)
                for first, (text, colour) in enumerate(parts)
            )
            drawn.append(Segment(" " * (width + 1 - sum(cell_len(text) for text, _ in parts)), style))
        return Strip(drawn).simplify().crop_extend(left, left + self.size.width, style)

    @property
    def _seen(self) -> int:
        """Number of rows that fit."""
        return max(1, self.scrollable_content_region.height - 1)

    def _draw(self, row: int) -> None:
        """Redraw the line of a row, if visible."""
        if 0 < (line := row + 1 - self.scroll_offset.y) < self.size.height:
            self.refresh(Region(0, line, self.size.width, 1))


LOOK = 0.5
"""Seconds between checks for changes."""
KEPT = 400
"""Points of the chart of the mean utilization."""
SHOWN = 1_000
"""Most rows of a table; the filter finds the others."""
BLOCKS = " ▁▂▃▄▅▆▇█"
LATEST = 100
"""Decisions shown."""
PAST = 20
"""Past readings drawn in the row of a GPU."""
BAR = 10
"""Width of a bar in characters."""
LEVELS = ((85.0, "red"), (50.0, "yellow"), (0.0, "green"))
"""The percentage from which a bar has each colour."""
FIGURES = {"nodes_online": "nodes", "mean_utilization": "busy", "memory_in_use": "memory"}
"""Shorter words for figures, so that all fit 80 columns."""
TABLES: dict[str, Columns] = {
    # What fits 80 columns comes first: how busy it is, and who holds it.
    "gpus": {
        **{name: heading for name, heading in rows.GPUS.columns.items() if name != "model"},
        "past": f"last {PAST} looks",
        "model": rows.GPUS.columns["model"],
        "why": "why",
    },
    "reservations": rows.RESERVATIONS.columns,
    "endpoints": rows.ENDPOINTS.columns,
    "decisions": rows.DECISIONS.columns,
    "health": rows.HEALTH.columns,
    "processes": {"gpu": "GPU"}
    | {name: PROCESSES.columns[name] for name in ("user", "used", "memory", "program", "pid", "reservation")},
}
UTILIZATION = [*TABLES["gpus"]].index("util")


def load_lines(percents: Sequence[float]) -> tuple[str, str]:
    """Bars of 0 to 100 percent, two characters high: the upper and the lower line."""
    eighths = [round(min(max(one, 0.0), 100.0) * 0.16) for one in percents]
    upper = "".join(BLOCKS[max(one - 8, 0)] for one in eighths)
    return upper, "".join(BLOCKS[min(one, 8)] for one in eighths)


class Top(App[None]):
    """The whole fleet on one screen; `program` runs commands about a row."""

    CSS = """
    Screen { overflow: hidden; }
    TabbedContent, TabPane, ContentSwitcher { height: 1fr; padding: 0; }
    #head { height: 1; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis; }
    #load { height: 2; margin: 0 1; }
    #problem { height: auto; padding: 0 1; color: $error; display: none; }
    #filter { display: none; }
    Grid { height: 1fr; }
    .-low #load, .-low Tabs { display: none; }
    """
    TITLE = "gpuscale"
    ENABLE_COMMAND_PALETTE = False
    VERTICAL_BREAKPOINTS = [(0, "-low"), (12, "-high")]  # noqa: RUF012
    AUTO_FOCUS = "#table-gpus"
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(number), f"show('{name}')", name, show=False) for number, name in enumerate(TABLES, 1)),
        Binding("e", "ask('why')", "why", tooltip="explain or describe the selected row, as Enter does"),
        Binding("l", "ask('logs')", "logs", tooltip="of the selected endpoint, replica or job"),
        Binding("x", "end", "end", tooltip="stop the selected job or release the reservation; asks first"),
        Binding("slash", "filter", "filter", key_display="/", tooltip="words that a row must show"),
        Binding("s", "sort", "sort", tooltip="by the next column"),
        Binding("r", "reverse", "reverse the order", show=False),
        Binding("t", "tree", "tree", tooltip="GPUs below their hosts, with the hosts' CPU and memory"),
        Binding("p,space", "pause", "pause"),
        Binding("escape", "clear", "clear the filter", show=False),
        Binding("question_mark", "keys", "keys", key_display="?"),
        Binding("q", "quit", "quit"),
    ]

    def __init__(
        self, connect: Callable[[], AsyncClient], program: Sequence[str] = (), *, ascii_only: bool = False
    ) -> None:
        super().__init__()
        self._connect = connect
        self._program = program
        self._ascii = ascii_only
        self._facts = Facts()
        self._stack = AsyncExitStack()
        self._tables: dict[str, Grid] = {}
        self._decisions: Sequence[autoscaler_api.Decision] = ()
        self._asked: object = None
        self._read: object = None
        self._load: deque[float] = deque(maxlen=KEPT)
        self._sorted: dict[str, tuple[int, bool]] = {}
        self._rows_shown: dict[str, list[Row]] = {}
        self._past: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=PAST))
        self._tree = True
        self._drawn = -1
        self._paused = False

    def compose(self) -> ComposeResult:
        """Lay out the widgets."""
        yield Static(id="head")
        yield Static(id="problem", markup=False)
        if not self._ascii:
            yield Static(id="load", markup=False)
        with TabbedContent(id="tabs"):
            for number, name in enumerate(TABLES, 1):
                paint = self._bar if name == "gpus" else self._plain
                self._tables[name] = Grid(tuple(TABLES[name].values()), paint, f"table-{name}")
                with TabPane(f"{number} {name}", id=name):
                    yield self._tables[name]
        # Disabled while hidden, so that it takes no keys.
        yield Input(placeholder="words that a row must show; Esc to clear", id="filter", disabled=True)
        yield Footer()

    async def on_mount(self) -> None:
        """Connect, and start refreshing."""
        client = await self._stack.enter_async_context(self._connect())
        feed = Feed(client, self._facts)
        await self._stack.enter_async_context(feed.running())
        feed.look()
        self.set_interval(LINGER / 2, feed.look)
        self.set_interval(LOOK, lambda: self._look(client))

    async def on_unmount(self) -> None:
        """Stop the feed and close the client."""
        await self._stack.aclose()

    def action_show(self, name: str) -> None:
        """Open a table."""
        self.query_one("#tabs", TabbedContent).active = name
        self._tables[name].focus()
        self._redraw()

    def action_sort(self) -> None:
        """Sort by the next column; after the last, restore the original order."""
        name = self._active
        column, reverse = self._sorted.get(name, (-1, False))
        self._sorted[name] = (column + 1 if column + 1 < len(TABLES[name]) else -1, reverse)
        self._redraw()

    def action_reverse(self) -> None:
        """Reverse the order."""
        column, reverse = self._sorted.get(self._active, (-1, False))
        self._sorted[self._active] = (column, not reverse)
        self._redraw()

    def action_pause(self) -> None:
        """Pause or resume updates of the screen."""
        self._paused = not self._paused
        self._redraw()

    def action_keys(self) -> None:
        """Show all keys."""
        keys = [one for one in self.BINDINGS if isinstance(one, Binding)]
        words = [(one.key_display or one.key, one.description, one.tooltip) for one in keys]
        lines = [f"{key:<8} {': '.join(filter(None, told))}" for key, *told in words]
        self.push_screen(Box("\n".join(["arrows   select; left and right show more columns", *lines])))

    def action_tree(self) -> None:
        """Toggle between GPUs alone and GPUs below their hosts."""
        self._tree = not self._tree
        self._redraw()

    def _selected(self) -> tuple[Row, allocator_api.Reservation | None] | None:
        """The row under the cursor and its reservation; None in an empty table."""
        shown, at = self._rows_shown.get(self._active, []), self._tables[self._active].cursor
        if not 0 <= at < len(shown):
            return None
        return shown[at], answers.of_row(self._active, shown[at], self._facts.reservations)

    def action_ask(self, what: Literal["why", "logs"]) -> None:
        """Run a command about the row under the cursor and show its output."""
        if (selected := self._selected()) is None:
            return
        if words := (answers.why if what == "why" else answers.logs)(self._active, *selected):
            self.push_screen(Answer(self._program, words))
        else:
            told = "it has ended" if what == "why" else "only endpoints, replicas and jobs have logs"
            self.notify(told, severity="warning")

    def on_grid_row_chosen(self) -> None:
        """Explain the chosen row."""
        self.action_ask("why")

    def action_end(self) -> None:
        """Stop the job under the cursor, or release its reservation, after confirmation."""
        if (selected := self._selected()) is None or (held := selected[1]) is None:
            self.notify("no reservation holds it", severity="warning")
            return
        words, where = answers.end(held), rows.places((node_of(gpu), gpu.index) for gpu in held.gpus)
        about = f"{short_holder(held.holder)} holds {where or 'nothing yet'}."

        def end(confirmed: bool | None) -> None:
            if confirmed:
                self.push_screen(Answer(self._program, words))

        self.push_screen(Confirm(words, about), end)

    def action_filter(self) -> None:
        """Open the filter."""
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
        """Apply the filter."""
        self._redraw()

    def on_input_submitted(self) -> None:
        """Return to the table."""
        self._tables[self._active].focus()

    def on_tabbed_content_tab_activated(self) -> None:
        """Refresh the newly shown table."""
        self._redraw()

    @property
    def _active(self) -> str:
        return self.query_one("#tabs", TabbedContent).active or next(iter(TABLES))

    def _look(self, client: AsyncClient) -> None:
        if self._paused:
            return
        # Whenever an endpoint changed: it names its newest decision.
        if self._active == "decisions" and self._asked is not self._facts.endpoints:
            self._asked = self._facts.endpoints
            self.run_worker(self._ask(client), exclusive=True)
        if self._drawn != self._facts.version:
            self._redraw()

    async def _ask(self, client: AsyncClient) -> None:
        request = autoscaler_api.ListDecisionsRequest(page_size=LATEST)
        try:
            self._decisions = (await client.decisions.ListDecisions(request)).decisions
        except GpuscaleError as error:
            self._facts.lost("decisions", error.message)
            self._asked = None
        else:
            self._facts.heard("decisions")
            self._facts.changed()

    def _redraw(self) -> None:
        facts = self._facts
        self._drawn = facts.version
        gpus = facts.gpus()
        figures = rows.fleet_figures(list(facts.nodes.values()), gpus)
        words = "  ".join(f"{figure} {FIGURES.get(word, word)}" for word, figure in figures.items())
        # No new layout, which would redraw the whole screen.
        head, told = self.query_one("#head", Static), ("PAUSED  " if self._paused else "") + words
        if head.content != told:
            head.update(told, layout=False)
        problem, told = self.query_one("#problem", Static), "; ".join(facts.wrong)
        if problem.content != told:
            problem.update(told)
            problem.display = bool(told)
        if facts.nodes is not self._read and not self._paused:
            self._read = facts.nodes
            for gpu in gpus:
                if gpu.utilization is not None:
                    self._past[gpu.uuid].append(gpu.utilization)
            load = rows.mean(gpu.utilization for gpu in gpus)
            if load is not None and not self._ascii:
                self._load.append(load)
                line = self.query_one("#load", Static)
                line.update("\n".join(load_lines([*self._load][-line.size.width or KEPT :])), layout=False)
        # The rows of the table; the cursor stays, and nothing is drawn without a change.
        name, text = self._active, self.query_one("#filter", Input).value
        found = [row for row in self._rows(name, gpus) if rows.matches(row, text)]
        column, reverse = self._sorted.get(name, (-1, False))
        if column >= 0:
            by = [*TABLES[name]][column]
            found.sort(key=lambda row: rows.sort_key(str(row[by])))
        if reverse:
            found.reverse()
        if name == "gpus" and self._tree and column < 0:  # each host's after a row for the host
            marked = marks(facts.cordons)
            found = [
                row
                for node, below in groupby(found, lambda row: str(row["gpu"]).rpartition("/")[0])
                for row in (rows.host_row(facts.nodes[f"nodes/{node}"], marked), *below)
            ]
        self._rows_shown[name] = found = found[:SHOWN]
        cells = [tuple(self._printable(row.get(column, "")) for column in TABLES[name]) for row in found]
        self._tables[name].show(cells)

    def _rows(self, name: str, gpus: Sequence[GpuSummary]) -> list[Row]:
        facts = self._facts
        if name == "gpus":
            return [self._gpu_row(gpu) for gpu in gpus]
        if name == "processes":
            return [
                {**row, "gpu": f"{node.name.partition('/')[2]}/{gpu.index}"}
                for node in facts.nodes.values()
                for gpu in node.snapshot.gpus
                for row in PROCESSES.rows(gpu.reading.processes)
            ]
        if name == "reservations":
            by_uuid, now = {gpu.uuid: gpu for gpu in gpus}, datetime.now(UTC)
            return [rows.reservation_row(one, by_uuid, now) for one in facts.reservations]
        if name == "endpoints":
            return rows.ENDPOINTS.rows(facts.endpoints)
        if name == "decisions":
            return rows.DECISIONS.rows(self._decisions)
        return rows.health_rows(facts)

    def _gpu_row(self, gpu: GpuSummary) -> Row:
        """The row of a GPU, with the reason for its state in a column of its own, and its past readings."""
        row = rows.GPUS.row(gpu)
        state, _, why = str(row["state"]).partition(": ")
        read = () if self._ascii else self._past[gpu.uuid]
        past = "".join(BLOCKS[round(min(one, 100) * 0.08)] for one in read).rjust(PAST)
        memory = humanize.part(gpu.memory_used, gpu.memory_total)  # which fits into 80 columns
        return {**row, "state": state, "why": why, "past": past, "memory": memory}

    def _printable(self, cell: object) -> str:
        text = str(cell)
        if self._ascii and not text.isascii():
            text = text.replace("→", "->").encode("ascii", "replace").decode()
        return text if text.isprintable() else "".join(one if one.isprintable() else " " for one in text)

    def _plain(self, _: int, cell: str) -> Parts:
        return ((cell, ""),)

    def _bar(self, column: int, cell: str) -> Parts:
        """The utilization as `█████      52 %`, coloured by level; any other cell unchanged."""
        percent, unit, _ = cell.partition(" %")
        if column != UTILIZATION or not unit:
            return self._plain(column, cell)
        share = float(percent)
        full = ("|" if self._ascii else "█") * round(min(share, 100.0) * BAR / 100)
        colour = next((one for least, one in LEVELS if share >= least), "")
        return (full.ljust(BAR), colour), (f"{percent:>4} %", "")
