"""Take the pictures of docs/pictures again: of `gpuscalectl up --demo`, its pages and `gpuscalectl top`, by Debian's Chromium.

python tools/pictures.py
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from gpuscale.client import connect_async  # noqa: E402 - the root is on the path first
from gpuscale.dashboard.terminal import Top  # noqa: E402
from tests.e2e.browser import chromium  # noqa: E402
from tests.support.ports import free_port  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
PAGES = {
    "fleet": "/",
    "endpoint": "/endpoints/chat",
    "usage": "/usage",
}
LIVED = 150.0
"""Seconds for which the demo runs before: two hours and a half of its day."""
SIZE = 132, 36
"""Columns and rows of the terminal of `top`."""
SEEN = 100.0
"""Seconds of the lines that are drawn there."""
DRAWN = 3.0
"""Seconds until the charts of a page stand still."""


def main() -> None:
    """Start the demo, let it live, and look at its pages."""
    control = str(Path(sys.executable).with_name("gpuscalectl"))
    address = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as folder:
        command = [control, "up", "--demo", "--demo-speed=60", f"--listen={address}", f"--data-dir={folder}"]
        demo = subprocess.Popen([*command, "--dashboard-port=0"], stdout=subprocess.PIPE, text=True)
        try:
            assert demo.stdout is not None
            lines = [demo.stdout.readline() for _ in range(3)]
            link = re.search(r"http://\S+", "".join(lines))
            assert link, lines
            _look(link[0])
            _draw(asyncio.run(_top(address)))
        finally:
            demo.terminate()
            demo.wait()


def _look(link: str) -> None:
    with chromium() as browser:
        page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
        page.goto(link)  # which starts the dashboard
        time.sleep(LIVED)
        base = link.partition("/open/")[0]
        for name, path in PAGES.items():
            page.goto(base + path)
            time.sleep(DRAWN)
            page.screenshot(path=PICTURES / f"{name}.png")
            print(f"docs/pictures/{name}.png")


async def _top(address: str) -> str:
    """What a terminal of SIZE shows, as SVG, after SEEN seconds."""
    top = Top(lambda: connect_async(address))
    async with top.run_test(size=SIZE) as pilot:
        await pilot.pause(SEEN)
        return top.export_screenshot()


def _draw(svg: str) -> None:
    with chromium() as browser:
        page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
        page.set_content(svg)
        page.locator("svg").screenshot(path=PICTURES / "top.png", omit_background=True)
        print("docs/pictures/top.png")


if __name__ == "__main__":
    main()
