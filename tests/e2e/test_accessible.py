"""Each page by WCAG 2.2 AA, as axe-core finds it in a real browser, by day and by night; and by the keyboard alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from axe_playwright_python.sync_playwright import Axe

from gpuscale.common.secrets import write_link
from tests.e2e.browser import chromium, page_of
from tests.e2e.dashboard import dashboard
from tests.support.ports import free_port
from tests.support.up import Up

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
PAGES = {
    "/": "boreas/7",
    "/time": "a row is a GPU",
    "/reservations": "GPUs reserved and idle",
    "/usage": "hours of whole GPUs",
    "/bookings": "nothing is booked this week",
    "/policies": "held and not used",
    "/endpoints": "embed",
    "/endpoints/chat": "granted",
    "/recordings": "nothing was recorded",
    "/health": "times",
    "/nowhere": "there is no page",
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as one:
        yield one


@pytest.fixture(scope="module")
def link_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """That of a dashboard over the demo, whose visitors may act."""
    folder = tmp_path_factory.mktemp("demo")
    port, file = free_port(), folder / "link"
    write_link(file, f"127.0.0.1:{port}")
    flags = ("--link-file", str(file), "--calendar-file", str(folder / "calendar"))
    demo = ("--demo", "--demo-speed", "60", "--no-dashboard")
    with Up(folder, arguments=demo) as up, dashboard(up.address, *flags, port=port):
        yield file


def come(page: Page, link_file: Path) -> str:
    """Sign in; returns the address of the site."""
    link = link_file.read_text()
    page.goto(link)
    return link.partition("/open/")[0]


@pytest.mark.parametrize("dark", [False, True], ids=["day", "night"])
def test_axe_finds_nothing_on_any_page(browser: Browser, link_file: Path, dark: bool) -> None:
    with page_of(browser, dark=dark, expected="404") as page:
        site = come(page, link_file)
        page.locator("a[href^='/gpus/']").first.wait_for()
        gpu = page.locator("a[href^='/gpus/']").first.get_attribute("href") or ""
        found: dict[str, list[str]] = {}
        for path, text in {**PAGES, gpu: "a point each"}.items():
            page.goto(site + path)
            page.get_by_text(text).first.wait_for()
            wrong = Axe().run(page, options={"runOnly": TAGS}).response["violations"]
            found[path] = [f"{one['id']}: {one['nodes'][0]['html']}" for one in wrong]
        assert not any(found.values()), found


def test_times_are_those_of_the_browser_and_utc_when_pointed_at(browser: Browser, link_file: Path) -> None:
    with page_of(browser, zone="Asia/Kolkata") as page:
        site = come(page, link_file)
        page.goto(f"{site}/endpoints/chat")
        page.get_by_text("times: Asia/Calcutta").or_(page.get_by_text("times: Asia/Kolkata")).wait_for()
        cell = page.locator("tbody td[title$=' UTC']").first
        cell.wait_for()
        said, shown = cell.get_attribute("title") or "", cell.inner_text()
        ahead = page.evaluate("([utc, local]) => Date.parse(local + 'Z') - Date.parse(utc.replace(' UTC', 'Z'))", [said, shown])  # fmt: skip
        assert ahead == 5.5 * 3600 * 1000, (said, shown)


def test_a_filter_is_in_the_address_and_a_table_sorted_by_the_keyboard(
    browser: Browser, link_file: Path
) -> None:
    with page_of(browser) as page:
        site = come(page, link_file)
        page.goto(f"{site}/?filter=dione&show=memory")
        page.get_by_text("dione/3").first.wait_for()
        assert page.get_by_text("atlas/0").count() == 0
        assert page.get_by_role("button", name="memory").get_attribute("aria-pressed") == "true"
        page.wait_for_function("window.did_handshake")
        page.get_by_label("filter").fill("boreas")
        page.wait_for_url(f"{site}/?show=memory&filter=boreas")
        page.get_by_role("columnheader", name="GPU", exact=True).press("Enter")
        page.locator("th.sorted").wait_for()
        page.get_by_role("columnheader", name="GPU", exact=True).press("Enter")
        page.locator("tbody tr").first.get_by_text("boreas/7").wait_for()
