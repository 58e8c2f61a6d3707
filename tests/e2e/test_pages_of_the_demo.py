"""The pages over the demo, in a real browser: by WCAG 2.2 AA as axe-core finds it, by the keyboard, and what visitors do on them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.request import urlopen

import psutil
import pytest
from axe_playwright_python.base import AXE_SCRIPT

from gpuscale.common.secrets import write_link
from tests.e2e.browser import page_of
from tests.e2e.dashboard import dashboard
from tests.support.cli import Ran
from tests.support.ports import free_port
from tests.support.up import Typed, Up
from tests.support.waiting import eventually_sync

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
PAGES = {
    "/?show=holder": "embed",  # the first page, and the legend of its map
    "/time": "a row is a GPU",
    "/reservations": "GPUs reserved and idle",
    "/usage": "hours of whole GPUs",
    "/bookings": "nothing is booked this week",
    "/policies": "unused for an hour",
    "/endpoints": "embed",
    "/endpoints/chat": "granted",
    "/recordings": "no recordings:",
    "/health": "times",
    "/audit": "calls that may have changed something",
    "/nowhere": "no page /nowhere",
}
AT_ONCE = """document.adoptedStyleSheets = [new CSSStyleSheet()];
document.adoptedStyleSheets[0].replaceSync("*, ::before, ::after { transition: none !important }");"""
"""Colours of the night are not on their way for half a second, in which all is drawn at each frame."""


@pytest.fixture(scope="module")
def link_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """That of a dashboard over the demo, whose visitors may act."""
    folder = tmp_path_factory.mktemp("demo")
    port, file = free_port(), folder / "link"
    write_link(file, f"127.0.0.1:{port}")
    flags = ("--link-file", str(file), "--calendar-file", str(folder / "calendar"))
    demo = ("--demo", "--demo-speed", "60", "--no-dashboard")
    with Up(folder, arguments=demo) as up, dashboard(up.address, *flags, port=port):
        (folder / "address").write_text(up.address)
        yield file


def sign_in(page: Page, link_file: Path) -> str:
    """Without loading a page; returns the address of the site."""
    link = link_file.read_text()
    page.request.get(link, max_redirects=0)
    return link.partition("/open/")[0]


def come(page: Page, link_file: Path, path: str = "") -> str:
    """Sign in, and load a page: the first one by the link itself. Returns the address of the site."""
    if not path:
        page.goto(link_file.read_text())
        return link_file.read_text().partition("/open/")[0]
    site = sign_in(page, link_file)
    page.goto(site + path)
    return site


@pytest.mark.timeout(900)
def test_axe_finds_nothing_on_any_page(browser: Browser, link_file: Path) -> None:
    """By night the colours alone are others."""
    with page_of(browser, expected="404") as page:
        site = sign_in(page, link_file)
        gpu = a_gpu(page, site)
        page.add_init_script(AXE_SCRIPT + AT_ONCE)
        page.goto(f"{site}/endpoints/chat")
        links = [page.locator(f"a[href*='/{kind}/']").first for kind in ("decisions", "replicas")]
        decision, replica = (link.get_attribute("href") or "" for link in links)
        more = {replica: "new lines appear here", decision: "combine", gpu: "a point every"}
        found: dict[tuple[str, bool], list[str]] = {}
        for path, text in {**more, **PAGES}.items():  # first what the demo, at 60 x, may take away
            page.goto(site + path)
            page.get_by_text(text).first.wait_for()
            found[path, False] = complaints(page, TAGS)
            page.emulate_media(color_scheme="dark")
            page.locator("body.body--dark").wait_for()
            found[path, True] = complaints(page, ["color-contrast"])
            page.emulate_media(color_scheme="light")
        assert not any(found.values()), found


def a_gpu(page: Page, site: str) -> str:
    """The path of a GPU, in what comes with the first page once one was asked for; it is not loaded."""
    return eventually_sync(lambda: re.findall(r'/gpus/[^"\\]+', page.request.get(site).text()))[0]


def complaints(page: Page, rules: list[str]) -> list[str]:
    """What axe-core finds by these rules, and where."""
    options = {"runOnly": rules, "resultTypes": ["violations"], "preload": False}
    told = page.evaluate("options => axe.run(options)", options)
    return [f"{one['id']}: {one['nodes'][0]['html']}" for one in told["violations"]]


def test_the_bookings_are_a_calendar_for_whoever_has_its_secret_address(
    browser: Browser, link_file: Path
) -> None:
    with page_of(browser) as page:
        site = sign_in(page, link_file)
        [address] = set(re.findall(r'http[^"\\]+\.ics', page.request.get(f"{site}/bookings").text()))
    with urlopen(address) as answer:
        assert answer.headers.get_content_type() == "text/calendar"
        assert answer.read().startswith(b"BEGIN:VCALENDAR\r\n")
    with pytest.raises(HTTPError, match="404"):
        urlopen(address.replace(".ics", "x.ics"))


def test_a_filter_is_in_the_address_and_a_table_sorted_by_the_keyboard(
    browser: Browser, link_file: Path
) -> None:
    with page_of(browser) as page:
        site = come(page, link_file, "/?filter=dione&show=memory")
        page.get_by_text("dione/3").first.wait_for()
        assert page.get_by_text("atlas/0").count() == 0
        assert page.get_by_role("button", name="memory").get_attribute("aria-pressed") == "true"
        page.wait_for_function("window.did_handshake")
        page.get_by_label("filter").fill("boreas")
        page.wait_for_url(f"{site}/?show=memory&filter=boreas")
        page.get_by_text("boreas/0").first.wait_for()  # a key that meets the table before is lost with it
        page.get_by_role("columnheader", name="GPU", exact=True).press("Enter")
        page.locator("th.sorted").wait_for()
        page.get_by_role("columnheader", name="GPU", exact=True).press("Enter")
        page.locator("tbody tr").first.get_by_text("boreas/7").wait_for()


def test_a_slider_tells_what_an_endpoint_would_do_and_a_decision_its_stages(
    browser: Browser, link_file: Path
) -> None:
    """And times are those of the browser, and UTC when pointed at."""
    with page_of(browser, zone="Asia/Kolkata") as page:
        come(page, link_file, "/endpoints/chat")
        page.get_by_text("times: Asia/Calcutta").or_(page.get_by_text("times: Asia/Kolkata")).wait_for()
        cell = page.locator("tbody td[title$=' UTC']").first
        cell.wait_for()
        # At once: a new row may take its place.
        said, shown = cell.evaluate("one => [one.title, one.innerText]")
        ahead = page.evaluate("([utc, local]) => Date.parse(local + 'Z') - Date.parse(utc.replace(' UTC', 'Z'))", [said, shown])  # fmt: skip
        assert ahead == 5.5 * 3600 * 1000, (said, shown)
        slider = page.get_by_role("slider", name="in-flight")
        page.wait_for_function("window.did_handshake")
        length = slider.evaluate("one => one.clientWidth")
        slider.click(position={"x": length - 1, "y": 5})  # twice of what was read at most
        page.get_by_text(re.compile(r"would want \d")).wait_for()
        page.get_by_text("asks for").first.wait_for()
        slider.click(position={"x": 1, "y": 5})
        page.get_by_text("in-flight: 0", exact=True).wait_for()
        page.get_by_text("in-flight = 0 with").first.wait_for()
        page.locator("a[href*='/decisions/']").first.click()
        page.wait_for_url("**/endpoints/chat/decisions/*")
        page.get_by_text("combine", exact=True).wait_for()


def test_an_endpoint_that_is_not_there_cannot_be_acted_on(browser: Browser, link_file: Path) -> None:
    with page_of(browser) as page:
        site = come(page, link_file, "/endpoints/chat")
        page.get_by_role("button", name="pause").wait_for()
        page.goto(f"{site}/endpoints/chatt")
        page.get_by_text("no such endpoint").wait_for()
        page.wait_for_function("window.did_handshake")
        assert page.get_by_role("button", name="pause").count() == 0


def test_headings_on_a_phone_keep_no_room_for_an_order_that_is_not_theirs(
    browser: Browser, link_file: Path
) -> None:
    """Its sign took a line of its own above or below some of them."""
    with page_of(browser, width=390) as page:
        come(page, link_file, "/bookings")
        page.get_by_text("nothing is booked this week").wait_for()
        assert page.locator("th .q-table__sort-icon:visible").count() == 0


def test_a_log_is_read_where_a_replica_is(browser: Browser, link_file: Path) -> None:
    with page_of(browser) as page:
        site = come(page, link_file, "/endpoints/chat")
        page.locator("a[href*='/replicas/']").first.click()
        line = page.get_by_role("log").get_by_text("ready: listening on port 8000")
        line.wait_for()
        there = "one => { const {x, y} = one.getBoundingClientRect(); return document.elementFromPoint(x + 5, y + 5) === one; }"
        assert line.evaluate(there), "it is cut off"
        path = page.get_by_role("link", name="the full log").get_attribute("href") or ""
        log = page.request.get(site + path)
        assert log.headers["content-type"] == "text/plain; charset=utf-8"
        assert "ready: listening on port 8000" in log.text()
        assert page.request.get(f"{site}{path.replace('/log', 'x/log')}").status == 404


def act(page: Page, name: str, answer: str, why: str = "") -> None:
    page.wait_for_function("window.did_handshake")
    page.get_by_role("button", name=name, exact=True).first.click()
    page.get_by_role("dialog").wait_for()
    if why:
        page.get_by_label("why").fill(why)
    page.get_by_role("button", name=answer).click()
    page.get_by_role("dialog").wait_for(state="detached")


def test_what_visitors_do_is_asked_first_and_audited(browser: Browser, link_file: Path) -> None:
    def audited(method: str) -> int:
        return (link_file.parent / "data" / "audit.jsonl").read_text().count(f"/{method}")

    with page_of(browser) as page:
        site = come(page, link_file, "/?filter=atlas")  # which the demo itself never cordons
        act(page, "cordon", "No")
        before = audited("CordonNode")
        act(page, "cordon", "Yes", "a fan is broken")
        page.get_by_text("online,cordoned").wait_for()
        eventually_sync(lambda: audited("CordonNode") > before)
        act(page, "uncordon", "Yes")
        page.get_by_text("online,cordoned").wait_for(state="detached")
        page.goto(f"{site}/endpoints/embed")
        act(page, "pause", "Yes")
        page.get_by_text("embed · paused").wait_for()
        page.get_by_role("spinbutton", name="replicas").fill("3")
        act(page, "order", "No")
        assert audited("SetReplicas") == 0
        act(page, "order", "Yes")
        page.get_by_text("3 replicas are wanted now").wait_for()
        act(page, "resume", "Yes")
        page.get_by_text("embed · paused").wait_for(state="detached")
        page.goto(f"{site}/audit?filter=uncordon+atlas+ok")
        rows = page.locator("tbody tr")
        rows.filter(has_text="UncordonNode").first.wait_for()
        assert rows.count() == rows.filter(has_text="UncordonNode").filter(has_text="nodes/atlas").count()
        page.wait_for_function("window.did_handshake")
        page.get_by_label("filter").fill("SetReplicas")
        rows.filter(has_text="endpoints/embed").first.wait_for()
        page.get_by_text("UncordonNode").wait_for(state="detached")
        page.get_by_label("filter").fill("SetReplicas nobody")
        page.get_by_text("no call matches").wait_for()


def test_a_job_tells_why_it_waits_what_it_got_and_wrote(browser: Browser, link_file: Path) -> None:
    def ctl(*words: str) -> Ran:
        return Typed("--address", (link_file.parent / "address").read_text(), *words).ended()

    with page_of(browser) as page:
        goes_on = link_file.with_name("goes-on")
        script = f"seq 100000; until [ -e {goes_on} ]; do sleep 0.1; done; echo said by the first"
        words = ("run", "-d", "--gpus", "2", "--name")
        begun = [ctl(*words, "talks", "--", "sh", "-c", script), ctl(*words, "waits", "--", "true")]
        assert [one.code for one in begun] == [0, 0], begun
        first, second = (one.out.strip() for one in begun)
        site = come(page, link_file, "/reservations?filter=waiting")
        waits = page.get_by_text(re.compile("(before it|next in the queue): no room now for 2 GPUs")).first
        waits.wait_for()
        page.get_by_role("link", name=second).click()
        waits.wait_for()
        page.goto(f"{site}/reservations/{first}")
        page.get_by_text(re.compile(r"^[\d.]+ x memory [\d.]+ \+ ")).first.wait_for()  # why these GPUs
        goes_on.touch()
        page.get_by_role("log").get_by_text("said by the first").wait_for()
        page.get_by_text("succeeded; full output").wait_for()
        assert page.get_by_role("log").inner_text().count("\n") == 9, "the last lines alone"
        path = page.get_by_role("link", name="the full output").get_attribute("href") or ""
        lines = page.request.get(site + path).text().splitlines()
        assert lines == [*map(str, range(1, 100_001)), "said by the first"]
        assert page.request.get(f"{site}/reservations/nothing/output").status == 404
        # Who would start the second waits for the service to come back, unless it hears of the end before.
        ctl("stop", "job", second)
        eventually_sync(lambda: not is_running(f"{second}-queued"))


def is_running(word: str) -> bool:
    """Whether there is a process with this word in its command line."""
    return any(word in (one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"]))


def test_a_span_that_is_drawn_on_a_chart_is_in_the_address(browser: Browser, link_file: Path) -> None:
    """The page of a GPU is found in lower case, too, as names have it."""
    with page_of(browser) as page:
        site = sign_in(page, link_file)
        gpu = a_gpu(page, site)
        assert gpu.lower() != gpu
        for path, text in (
            (gpu.lower(), f" · {gpu.rpartition('/')[2]} · simulated"),
            ("/time", "a row is a GPU"),
        ):
            page.goto(site + path)
            page.get_by_text(text).first.wait_for()
            page.wait_for_function("""() => {
                const charts = [...document.querySelectorAll('.nicegui-echart')].map(e => getElement(e.id.slice(1)).chart);
                return charts[0]?.getModel()?.getComponent('brush')?.brushType === 'lineX'
                    && charts[0].getOption().series[0].data.length > 3;
            }""")
            box = page.locator("canvas").first.bounding_box()
            assert box is not None
            page.mouse.move(box["x"] + 0.8 * box["width"], box["y"] + 80)
            page.mouse.down()
            page.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + 80)
            page.mouse.up()
            page.wait_for_url(re.compile(r"\?from=\d{13}&until=\d{13}$"))
            drawn = [int(one) for one in re.findall(r"\d{13}", page.url)]
            assert 0 < drawn[1] - drawn[0] < 3600_000
            assert abs(drawn[1] / 1000 - time.time()) < 3600
            page.get_by_role("button", name="until now").click()
            page.wait_for_url(site + path)


def test_usage_of_days_leads_to_whose_it_is(browser: Browser, link_file: Path) -> None:
    with page_of(browser) as page:
        come(page, link_file, "/usage")
        page.get_by_role("link", name="ann", exact=True).click()
        page.wait_for_url("**/reservations?filter=ann")
        page.go_back()
        page.wait_for_function("window.did_handshake")
        page.get_by_label("until").fill("2020-01-02")
        page.get_by_label("from").fill("2020-01-01")
        page.wait_for_url("**/usage?from=2020-01-01&until=2020-01-02")
        page.get_by_text("no usage in this period").wait_for()
