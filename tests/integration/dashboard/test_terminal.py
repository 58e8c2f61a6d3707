"""`gpuscalectl top`, driven by its own pilot over a server on loopback."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from textual.pilot import Pilot
from textual.widgets import DataTable, Input, Static, TabbedContent

from gpuscale.client import UnavailableError, connect
from gpuscale.dashboard.terminal import Top
from gpuscale.testing import FakeServer
from tests.support.waiting import eventually


@asynccontextmanager
async def screen(server: FakeServer, *, ascii_only: bool = False) -> AsyncIterator[tuple[Top, Pilot[None]]]:
    top = Top(server.connect_async, ascii_only=ascii_only)
    async with top.run_test(size=(140, 40)) as pilot:
        yield top, pilot


HELD = 3
"""The column of who holds a GPU."""


def cells(top: Top, name: str) -> list[list[str]]:
    table = top.query_one(f"#table-{name}", DataTable)
    return [[str(cell) for cell in table.get_row_at(number)] for number in range(table.row_count)]


async def shows(top: Top, name: str, count: int) -> None:
    await eventually(lambda: len(cells(top, name)) == count, timeout=30)


async def first_column(top: Top, expected: list[str]) -> None:
    await eventually(lambda: [row[0] for row in cells(top, "gpus")] == expected, timeout=30)


async def test_gpus_are_there_and_a_reservation_is_seen_when_it_comes_and_goes() -> None:
    with FakeServer(gpus=4, nodes=2) as server, connect(server.address) as client:
        async with screen(server) as (top, pilot):
            await shows(top, "gpus", 8)
            assert [row[0] for row in cells(top, "gpus")][:5] == [
                *(f"node-0/{n}" for n in range(4)),
                "node-1/0",
            ]
            held = await asyncio.to_thread(client.reserve, 2, "night run", ttl=300)
            await eventually(
                lambda: sum(row[HELD] == "night run" for row in cells(top, "gpus")) == 2, timeout=30
            )
            await pilot.press("2")
            await shows(top, "reservations", 1)
            assert cells(top, "reservations")[0][:2] == [held.name.removeprefix("reservations/"), "night run"]
            await asyncio.to_thread(held.release)
            await shows(top, "reservations", 0)


async def test_rows_are_filtered_and_sorted_column_by_column() -> None:
    with FakeServer(gpus=1, nodes=3) as server:
        async with screen(server) as (top, pilot):
            await shows(top, "gpus", 3)
            await pilot.press("slash", *"node-1")
            await shows(top, "gpus", 1)
            await pilot.press("escape")
            await shows(top, "gpus", 3)
            assert not top.query_one("#filter", Input).display
            await pilot.press("s", "r")
            await first_column(top, ["node-2/0", "node-1/0", "node-0/0"])
            await pilot.press("r")
            await first_column(top, ["node-0/0", "node-1/0", "node-2/0"])


async def test_a_paused_screen_stays_as_it_is() -> None:
    with FakeServer(gpus=1) as server, connect(server.address) as client:
        async with screen(server) as (top, pilot):
            await shows(top, "gpus", 1)
            await pilot.press("p")
            await eventually(lambda: "PAUSED" in str(top.query_one("#head", Static).render()), timeout=30)
            held = await asyncio.to_thread(client.reserve, 1, "somebody", ttl=300)
            await eventually(lambda: bool(top._facts.reservations), timeout=30)
            await pilot.pause(1.0)
            assert cells(top, "gpus")[0][HELD] == ""
            await pilot.press("p")
            await eventually(lambda: cells(top, "gpus")[0][HELD] == "somebody", timeout=30)
            await asyncio.to_thread(held.release)


async def test_ascii_is_ascii() -> None:
    with FakeServer(gpus=1) as server:
        async with screen(server, ascii_only=True) as (top, pilot):
            await shows(top, "gpus", 1)
            assert all(cell.isascii() for row in cells(top, "gpus") for cell in row)
            await pilot.press("3")
            await eventually(lambda: top.query_one("#tabs", TabbedContent).active == "endpoints", timeout=30)


async def test_what_others_write_is_shown_as_it_is() -> None:
    """Brackets are markup to the library, and a bad one ended the program: anybody could blind everybody."""
    holder = "[/x] [bold]me[/] [1]"
    with FakeServer(gpus=1) as server, connect(server.address) as client:
        client.reserve(1, holder, ttl=300)
        server.fail("WatchCordons", UnavailableError("no way to [::1]:7070 [/x]"), times=1000)
        async with screen(server) as (top, _):
            await eventually(lambda: [row[HELD] for row in cells(top, "gpus")] == [holder], timeout=30)
            await eventually(lambda: "cordons: no way to [::1]:7070 [/x]" in problem(top), timeout=30)
            await eventually(lambda: holder in drawn(top), timeout=30)


def problem(top: Top) -> str:
    return str(top.query_one("#problem", Static).content)


def drawn(top: Top) -> str:
    """What is on the screen."""
    return top.export_screenshot().replace("&#160;", " ")
