"""A terminal table that draws only the lines that changed.

Textual's own table redraws every cell when one changes, which was four fifths of the work of `top`.
"""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import ClassVar, TypeAlias

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

Cells: TypeAlias = tuple[str, ...]
Parts: TypeAlias = Sequence[tuple[str, str]]
"""A cell as drawn: texts, each with the name of its colour, or an empty one."""


class Grid(ScrollView):
    """Rows of text under headings, one of them selected.

    Args:
        headings: column headings.
        paint: renders the cell of a column; must depend on the text alone.
        name: widget id.

    Attributes:
        rows: the rows shown.
        cursor: index of the selected row.
        widths: width of each column, in characters. Columns grow and do not shrink.
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
