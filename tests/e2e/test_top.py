"""`gpuscalectl top` over a real `up`."""

import asyncio
from pathlib import Path

from textual.widgets import Static

from gpuscale.client import connect, connect_async
from gpuscale.dashboard.terminal import Grid, Top
from tests.support.up import Up
from tests.support.waiting import eventually


async def test_the_screen_shows_the_gpus_of_this_machine_and_who_holds_them(tmp_path: Path) -> None:
    with await asyncio.to_thread(Up, tmp_path, simulate=8) as up, connect(up.address) as client:
        await asyncio.to_thread(client.reserve, 2, "training")
        top = Top(lambda: connect_async(up.address))
        async with top.run_test(size=(80, 24)) as pilot:
            table = top.query_one("#table-gpus", Grid)
            await eventually(lambda: len(table.rows) == 9, timeout=30)
            await eventually(lambda: [row[3] for row in table.rows].count("training") == 2, timeout=30)
            assert not top.query_one("#problem", Static).display
            head = top.query_one("#head", Static)
            assert "8 GPUs" in str(head.render())
            assert head.region.y == 0, "the figures stay on the screen"
            # The CPU of this host: it takes two looks.
            await eventually(lambda: table.rows[0][2].endswith(" %"), timeout=30)
            assert sum(table.widths[:5]) + 2 * 5 <= 80, "who holds it, and its memory, are seen at 80 columns"
            await pilot.press("question_mark")
            assert "choose a table" in str(top.screen.query_one("#text", Static).content)
            await pilot.press("question_mark")
            assert not top.screen.query("#text")
