"""`gpuscalectl top`, driven by its own pilot over a server on loopback."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from unittest.mock import patch

from textual.pilot import Pilot
from textual.widgets import Input, RichLog, Static, TabbedContent

from gpuscale.api.allocator.v1 import GetReservationRequest, Reservation
from gpuscale.client import Client, UnavailableError, connect
from gpuscale.dashboard.answers import Confirm
from gpuscale.dashboard.terminal import TABLES, Grid, Top
from gpuscale.testing import FakeServer
from tests.support.waiting import eventually


@asynccontextmanager
async def screen(
    server: FakeServer, *, ascii_only: bool = False, size: tuple[int, int] = (140, 40)
) -> AsyncIterator[tuple[Top, Pilot[None]]]:
    program = [sys.executable, "-m", "gpuscale.cli.main", f"--address={server.address}"]
    top = Top(server.connect_async, program, ascii_only=ascii_only)
    async with top.run_test(size=size) as pilot:
        try:
            yield top, pilot
        finally:
            top.exit()  # as by its key: else it may look once more for tables that are gone


HELD = 3
"""The column of who holds a GPU."""


def cells(top: Top, name: str) -> list[list[str]]:
    return [[*row] for row in top.query_one(f"#table-{name}", Grid).rows]


def gpus(top: Top) -> list[list[str]]:
    """The rows of GPUs, without those of hosts."""
    return [row for row in cells(top, "gpus") if "/" in row[0]]


async def shows(top: Top, name: str, count: int) -> None:
    await eventually(lambda: len(gpus(top) if name == "gpus" else cells(top, name)) == count)


async def first_column(top: Top, expected: list[str]) -> None:
    await eventually(lambda: [row[0] for row in cells(top, "gpus")] == expected)


async def test_gpus_are_there_and_a_reservation_is_seen_when_it_comes_and_goes() -> None:
    with FakeServer(gpus=4, nodes=2) as server, connect(server.address) as client:
        async with screen(server) as (top, pilot):
            await shows(top, "gpus", 8)
            first = ["node-0", *(f"node-0/{n}" for n in range(4)), "node-1", "node-1/0"]
            assert [row[0] for row in cells(top, "gpus")][:7] == first
            held = await asyncio.to_thread(client.reserve, 2, "night run", ttl=300)
            await eventually(lambda: sum(row[HELD] == "night run" for row in gpus(top)) == 2)
            await pilot.press("2")
            await eventually(lambda: top.query_one("#tabs", TabbedContent).active == "reservations")
            await shows(top, "reservations", 1)
            assert cells(top, "reservations")[0][:2] == [held.name.removeprefix("reservations/"), "night run"]
            await asyncio.to_thread(held.release)
            await shows(top, "reservations", 0)


async def test_rows_are_filtered_and_sorted_column_by_column_and_ascii_where_asked_for() -> None:
    with FakeServer(gpus=1, nodes=3) as server:
        async with screen(server, ascii_only=True) as (top, pilot):
            await shows(top, "gpus", 3)
            assert all(cell.isascii() for row in cells(top, "gpus") for cell in row)
            await pilot.press("slash", *"node-1")
            await shows(top, "gpus", 1)
            await pilot.press("escape")
            await shows(top, "gpus", 3)
            assert not top.query_one("#filter", Input).display
            await pilot.press("s", "r")
            await first_column(top, ["node-2/0", "node-1/0", "node-0/0"])
            await pilot.press("r")
            await first_column(top, ["node-0/0", "node-1/0", "node-2/0"])
            await pilot.press(*"s" * len(TABLES["gpus"]))
            await first_column(top, [f"node-{n}{gpu}" for n in range(3) for gpu in ("", "/0")])
            await pilot.press("t")
            await first_column(top, ["node-0/0", "node-1/0", "node-2/0"])


async def test_a_paused_screen_stays_as_it_is_and_says_what_has_ended() -> None:
    with FakeServer(gpus=1) as server, connect(server.address) as client:
        async with screen(server) as (top, pilot):
            await shows(top, "gpus", 1)
            await pilot.press("p")
            await eventually(lambda: "PAUSED" in str(top.query_one("#head", Static).render()))
            held = await asyncio.to_thread(client.reserve, 1, "somebody", ttl=300)
            await eventually(lambda: bool(top._facts.reservations))
            await pilot.pause(1.0)
            assert gpus(top)[0][HELD] == ""
            await pilot.press("p")
            await eventually(lambda: gpus(top)[0][HELD] == "somebody")
            await pilot.press("2")
            await shows(top, "reservations", 1)
            await pilot.press("p")
            await asyncio.to_thread(held.release)
            await eventually(lambda: not top._facts.reservations)
            with patch.object(top, "notify") as told:
                await pilot.press("e")
            told.assert_called_once_with("it has ended", severity="warning")


async def test_a_small_screen_has_the_figures_who_holds_a_gpu_and_the_keys() -> None:
    with FakeServer(gpus=8) as server:
        async with screen(server, size=(80, 24)) as (top, pilot):
            await shows(top, "gpus", 8)
            head, table = top.query_one("#head", Static), top.query_one("#table-gpus", Grid)
            figures = "1 / 1 nodes  8 GPUs  0 reserved  0 % busy  0.0 / 640.0 GiB memory  - power"
            assert str(head.render()) == figures
            assert head.region.y == 0, "the figures stay on the screen"
            assert not top.query_one("#problem", Static).display
            assert sum(table.widths[:5]) + 2 * 5 <= 80, "who holds it, and its memory, are seen at 80 columns"
            await pilot.press("question_mark")
            assert "release the reservation" in str(top.screen.query_one("#text", Static).content)
            await pilot.press("question_mark")
            assert not top.screen.query("#text")
            await pilot.resize_terminal(40, 8)
            await eventually(lambda: table.size.height >= 5)
            await pilot.press("question_mark")
            assert top.screen.query_one("#text", Static).region.width <= 40, "lines are folded"


async def test_what_others_write_is_shown_as_it_is() -> None:
    """Brackets are markup to the library, and a bad one ended the program: anybody could blind everybody."""
    holder = "[/x] [bold]me[/] [1]"
    with FakeServer(gpus=1) as server, connect(server.address) as client:
        client.reserve(1, holder, ttl=300)
        server.fail("WatchCordons", UnavailableError("no way to [::1]:7070 [/x]"), times=1000)
        async with screen(server) as (top, _):
            await eventually(lambda: [row[HELD] for row in gpus(top)] == [holder])
            await eventually(lambda: "cordons: no way to [::1]:7070 [/x]" in problem(top))
            await eventually(lambda: holder in drawn(top))


def answer(top: Top) -> str:
    """What the command that was run has written; nothing where none is shown."""
    logs = top.screen.query(RichLog)
    return "\n".join(line.text for line in logs.only_one().lines) if logs else ""


def state(client: Client, name: str) -> int:
    return client.allocator.GetReservation(GetReservationRequest(name=name)).reservation.state


async def test_what_holds_a_gpu_is_told_and_ended_from_its_row_once_that_is_confirmed() -> None:
    with FakeServer(gpus=2) as server, connect(server.address) as client:
        held = client.reserve(1, "night run", ttl=300)
        short = held.name.removeprefix("reservations/")
        async with screen(server) as (top, pilot):
            await eventually(lambda: "night run" in [row[HELD] for row in gpus(top)])
            held_at = [row[HELD] for row in cells(top, "gpus")].index("night run")
            await pilot.press(*["down"] * held_at)
            await pilot.press("enter")
            await eventually(lambda: short in answer(top) and "night run" in answer(top))
            await pilot.press("escape")
            await pilot.press("l")
            assert not answer(top), "it is of no job, which would write logs"
            await pilot.press("x")
            assert isinstance(top.screen, Confirm)
            await pilot.press("n")
            assert len(top.screen_stack) == 1, "no command was run"
            assert state(client, held.name) == Reservation.STATE_ACTIVE
            await pilot.press("x", "y")
            await eventually(lambda: "released" in answer(top))
            assert state(client, held.name) == Reservation.STATE_RELEASED
            await pilot.press("escape")
            await eventually(lambda: "night run" not in [row[HELD] for row in gpus(top)])
            await pilot.press("x")
            assert not isinstance(top.screen, Confirm), "nothing is held there any more"


async def test_what_a_command_refuses_is_shown_with_its_exit_code_and_one_goes_back() -> None:
    with FakeServer(gpus=1) as server:
        async with screen(server) as (top, pilot):
            await shows(top, "gpus", 1)
            server.fail("GetNode", UnavailableError("away", reason="UPSTREAM_UNAVAILABLE"), times=1000)
            await pilot.press("e")
            await eventually(lambda: "exit code 7" in answer(top))
            assert "error: away" in answer(top)
            await pilot.press("q")
            assert len(top.screen_stack) == 1, "back, and not at an end"


def problem(top: Top) -> str:
    return str(top.query_one("#problem", Static).content)


def drawn(top: Top) -> str:
    """What is on the screen."""
    return top.export_screenshot().replace("&#160;", " ")
