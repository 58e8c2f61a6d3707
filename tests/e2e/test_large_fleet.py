"""The dashboard with a thousand GPUs, all of which change every second: it loads, and a browser gets no more than it shows.

What it costs is held in bytes and elements, which do not depend on how busy the machine is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.browser import chromium, page_of
from tests.e2e.dashboard import dashboard, tile
from tests.support.large_site import LargeSite, large_site, uuid_of
from tests.support.waiting import eventually_sync

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PICTURES = os.environ.get("GPUSCALE_PICTURES", "")
"""Where a picture of each page is kept; nowhere when empty."""
LARGEST_MESSAGE = 100_000
"""Bytes that a browser gets at a time, at most: the map of all GPUs and a page of the table are less than half of it."""
SMALLEST_DRAWING = 5_000
"""Bytes; what is smaller says that the connection lives."""
MOST_ELEMENTS = 1_500
ELEMENTS = "document.querySelectorAll('*').length"
PAGES = {
    "fleet": ("/", "1-50 of 1000"),
    "over-time": ("/time", "a column is the mean"),
    "gpu": (f"/gpus/node-003/{uuid_of(3, 5)}", "a point each"),
    "endpoints": ("/endpoints", "chat-3"),
    "endpoint": ("/endpoints/chat-9", "1-10 of 120"),
    "recordings": ("/recordings", "night"),
    "recording": ("/recordings/night", "from the history"),
    "health": ("/health", "too hot"),
    "reservations": ("/reservations", "1-50 of 200"),
}


@pytest.fixture(scope="module")
def fleet() -> LargeSite:
    return LargeSite()


@pytest.fixture(scope="module")
def site(fleet: LargeSite) -> Iterator[str]:
    with large_site(fleet) as gateway, dashboard(gateway) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as one:
        yield one


def messages_of(page: Page) -> list[int]:
    """Lengths of what a page gets over its socket, as it gets it."""
    found: list[int] = []
    page.on(
        "websocket",
        lambda socket: socket.on("framereceived", lambda frame: found.append(len(frame))),
    )
    return found


@pytest.mark.parametrize("name", PAGES)
def test_every_page_of_a_thousand_gpus_is_small_and_fits_a_phone(
    browser: Browser, site: str, name: str
) -> None:
    path, text = PAGES[name]
    with page_of(browser, height=900) as page:
        messages = messages_of(page)
        started = time.monotonic()
        page.goto(site + path)
        page.get_by_text(text).first.wait_for()
        print(f"\n{name}: {time.monotonic() - started:.2f} s, {page.evaluate(ELEMENTS)} elements")
        if PICTURES:
            page.wait_for_timeout(6000)
            page.screenshot(path=Path(PICTURES) / f"{name}.png")
        assert page.evaluate(ELEMENTS) < MOST_ELEMENTS
        page.set_viewport_size({"width": 390, "height": 800})
        eventually_sync(lambda: page.evaluate("document.scrollingElement.scrollWidth") <= 390, timeout=10)
        if name != "over-time":  # a map of the past is sent once for each of its columns
            assert max(messages, default=0) < LARGEST_MESSAGE


def test_a_thousand_gpus_that_change_are_drawn_once_a_second(
    browser: Browser, site: str, fleet: LargeSite
) -> None:
    with page_of(browser) as page:
        messages = messages_of(page)
        page.goto(site)
        eventually_sync(lambda: tile(page, "reserved") == "800", timeout=30)
        messages.clear()
        started = time.monotonic()
        while len(drawings := [length for length in messages if length > SMALLEST_DRAWING]) < 5:
            page.wait_for_timeout(100)  # messages come while the browser is asked for something
        assert time.monotonic() - started > 2.0, "changes of many agents are drawn together"
        print(f"\n{sum(drawings) / len(drawings) / 1024:.0f} KiB a drawing")
        fleet.released = True
        changed = time.monotonic()
        try:
            eventually_sync(lambda: tile(page, "reserved") == "0", timeout=30)
            print(f"seen after {time.monotonic() - changed:.2f} s")
        finally:
            fleet.released = False


def test_a_table_is_sorted_as_a_whole_and_by_what_numbers_mean(browser: Browser, site: str) -> None:
    with page_of(browser) as page:
        messages = messages_of(page)
        page.goto(site)
        page.get_by_text("1-50 of 1000").wait_for()
        while max(messages, default=0) < SMALLEST_DRAWING:
            page.wait_for_timeout(50)  # the page is there before its connection is
        heading = page.get_by_role("columnheader", name="GPU", exact=True)
        heading.click()
        page.locator("th.sorted").wait_for()
        heading.click()
        page.locator("tbody tr").first.get_by_text("node-124/7").wait_for()
        page.get_by_role("button", name="Next page").first.click()  # of the GPUs; nodes have pages too
        page.get_by_text("51-100 of 1000").wait_for()


def test_a_cell_of_the_map_leads_to_its_gpu(browser: Browser, site: str) -> None:
    with page_of(browser) as page:
        messages = messages_of(page)
        page.goto(site)
        while max(messages, default=0) < SMALLEST_DRAWING:
            page.wait_for_timeout(50)
        canvas = page.locator("canvas").first
        canvas.wait_for()
        page.wait_for_timeout(500)  # ECharts puts what can be clicked there a frame after the picture
        box = canvas.bounding_box()
        assert box is not None
        page.mouse.click(box["x"] + box["width"] * 0.1, box["y"] + 14)
        page.wait_for_url("**/gpus/node-000/**")
