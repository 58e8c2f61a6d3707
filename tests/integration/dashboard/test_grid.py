"""The table of `gpuscalectl top`, alone: what it draws, and that it draws no more than what changed."""

from collections.abc import Callable
from typing import ClassVar, Self

from textual.app import App, ComposeResult
from textual.geometry import Region

from gpuscale.dashboard.terminal import Cells, Grid, Parts
from tests.support.waiting import eventually


class Counted(Grid):
    """Keeps which lines of the screen were to be drawn, counted from 0; None is all of them."""

    asked: ClassVar[list[int | None]] = []

    def refresh(
        self, *regions: Region, repaint: bool = True, layout: bool = False, recompose: bool = False
    ) -> Self:
        self.asked.extend([region.y for region in regions] or [None])
        return super().refresh(*regions, repaint=repaint, layout=layout, recompose=recompose)


class Alone(App[None]):
    """Nothing but a table."""

    def __init__(self) -> None:
        super().__init__()
        self.grid = Counted(("name", "of"), paint, "table")
        self.chosen: list[int] = []

    def compose(self) -> ComposeResult:
        yield self.grid

    def on_grid_row_chosen(self) -> None:
        self.chosen.append(self.grid.cursor)

    def drawn(self) -> list[str]:
        return [self.grid.render_line(y).text for y in range(self.grid.size.height)]


def paint(column: int, cell: str) -> Parts:
    return (("<", "red"), (cell, ""), (">", "")) if column else ((cell, ""),)


def fleet(count: int, **other: str) -> list[Cells]:
    return [(f"gpu-{number}", other.get(f"gpu{number}", "me")) for number in range(count)]


async def test_only_lines_that_changed_are_drawn() -> None:
    app = Alone()
    async with app.run_test(size=(40, 12)) as pilot:
        grid = app.grid

        def asked(do: Callable[[], None]) -> set[int | None]:
            grid.asked.clear()
            do()
            return {*grid.asked}

        assert asked(lambda: grid.show(fleet(8))) == {None}
        assert asked(lambda: grid.show(fleet(8))) == set()
        assert asked(lambda: grid.show(fleet(8, gpu3="ab"))) == {4}
        assert asked(lambda: grid.show(fleet(8, gpu5="ab"))) == {4, 6}, "one as it was, and another"
        assert asked(lambda: grid.show(fleet(8, gpu5="a long one"))) == {None}, "a column is wider"
        assert asked(lambda: grid.show(fleet(50, gpu5="a long one"))) == {None}
        assert asked(lambda: grid.show(fleet(50, gpu5="a long one", gpu40="x"))) == set(), "that is not seen"
        assert asked(lambda: grid.select(1)) == {1, 2}, "the row that was selected, and the one that is"
        await pilot.press("end")
        await eventually(lambda: grid.scroll_offset.y == 39)
        assert asked(lambda: grid.show(fleet(50, gpu5="a long one", gpu40="y"))) == {2}, "where it is"


async def test_columns_are_as_wide_as_what_they_show_and_cells_are_no_markup() -> None:
    app = Alone()
    async with app.run_test(size=(20, 4)) as pilot:
        app.grid.show([("算力", "[b]"), ("x", "y")])
        await pilot.pause()
        lines = [" name  of           ", " 算力  <[b]>        ", " x     <y>          ", " " * 20]
        assert app.drawn() == lines
        app.grid.show([("x" * 30, "y")])
        await pilot.pause()
        await pilot.press("right")
        await eventually(lambda: app.drawn()[1].startswith("xxx"))


async def test_the_selected_row_is_seen_wherever_it_moves_and_when_rows_go() -> None:
    app = Alone()
    async with app.run_test(size=(20, 6)) as pilot:
        app.grid.show(fleet(40))
        for keys, cursor, first in (
            (["end"], 39, "gpu-35"),
            (["pageup"], 34, "gpu-34"),
            (["home"], 0, "gpu-0"),
            (["down"] * 5, 5, "gpu-1"),
            (["pagedown"], 10, "gpu-6"),
            (["up"], 9, "gpu-6"),
        ):
            await pilot.press(*keys)
            await eventually(lambda first=first: app.drawn()[1].split()[0] == first)
            assert app.grid.cursor == cursor
        app.grid.show(fleet(3))
        assert app.grid.cursor == 2
        await eventually(lambda: [line.split()[:1] for line in app.drawn()[1:3]] == [["gpu-0"], ["gpu-1"]])
        app.grid.show([])
        await pilot.press("down", "enter")
        assert app.grid.cursor == 0


async def test_a_click_selects_and_one_more_chooses() -> None:
    app = Alone()
    async with app.run_test(size=(20, 6)) as pilot:
        app.grid.show(fleet(3))
        await pilot.click(app.grid, offset=(2, 3))
        assert (app.grid.cursor, app.chosen) == (2, [])
        await pilot.click(app.grid, offset=(2, 3))
        await pilot.click(app.grid, offset=(2, 0))
        await pilot.click(app.grid, offset=(2, 5))
        await pilot.press("up", "enter")
        assert (app.grid.cursor, app.chosen) == (1, [2, 1])
