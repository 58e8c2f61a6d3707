"""Tables: rows under headings, a page at a time, sorted here, so that a browser gets no more than it shows."""

from collections.abc import Awaitable, Callable, Sequence

from nicegui import ui
from nicegui.events import GenericEventArguments

from gpuscale.dashboard.rows import Columns, Row, ordered

ACT = "act"
"""The column of buttons."""
LENGTH = 50
"""Rows of a page of a table."""


class Table:
    """Rows under headings, found by a key. Cells of `link` columns lead to the page that the row names in `{column}_to`."""

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
            {"name": name, "label": label, "field": name, "align": "left", "sortable": name != ACT}
            for name, label in columns.items()
        ]
        with ui.element("div").classes("gs-panel"):
            # With a number of rows the browser asks for pages and orders; without one it would make them of what it has.
            self.element = ui.table(
                columns=heads,
                rows=[],
                row_key=key,
                pagination=self._pagination(),
                on_pagination_change=self._keep,
            )
        self.element.classes("full-width").props(f'flat dense no-data-label="{empty}"')
        self.element.props["rows-per-page-options"] = [length]
        self.element.on("request", self._asked, ["pagination"])
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
        """Show these rows: the page and the order that the visitor chose; nothing is sent where it is the same."""
        self._rows = rows
        self._draw()

    def _asked(self, event: GenericEventArguments) -> None:
        """Another page, or another order."""
        asked = event.args["pagination"]
        self._page = int(asked.get("page") or 1)
        self._column = str(asked.get("sortBy") or "")
        self._descending = bool(asked.get("descending"))
        self._draw()

    def _keep(self) -> None:
        """What a browser says of its own accord, when it is ready, may be older than what was shown meanwhile."""
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
        """In the words of Quasar."""
        return {
            "page": self._page,
            "rowsPerPage": self._length,
            "rowsNumber": len(self._rows),
            "sortBy": self._column or None,
            "descending": self._descending,
        }
