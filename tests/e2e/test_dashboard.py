"""The dashboard in a real browser, over a real `up`: it loads, it lives, and it lets in whom it should."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.client import connect
from gpuscale.common.wire import to_duration
from tests.support.browser import chromium, page_of
from tests.support.dashboard import dashboard, tile
from tests.support.ports import free_port
from tests.support.tokens import token, write_tokens
from tests.support.up import Up
from tests.support.waiting import eventually_sync

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CONFIG = """
[templates.sleep]
command = ["/bin/sleep", "1000"]
"""


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("dashboard")
    config = folder / "gpuscale.toml"
    config.write_text(CONFIG)
    with Up(folder, simulate=8, arguments=("--config", str(config))) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as one:
        yield one


@pytest.fixture(scope="module")
def site(up: Up) -> Iterator[str]:
    """The dashboard of an `up` with an endpoint and a recording."""
    spec = autoscaler_api.EndpointSpec(
        min_replicas=2,
        max_replicas=4,
        tick=to_duration(1),
        template=autoscaler_api.ReplicaTemplate(template="sleep", gpu_count=1),
    )
    with connect(up.address) as client:
        endpoint = autoscaler_api.Endpoint(name="endpoints/chat", spec=spec)
        request = autoscaler_api.CreateEndpointRequest(endpoint=endpoint, request_id=str(uuid.uuid4()))
        client.endpoints.CreateEndpoint(request)
    with dashboard(up.address) as url:
        yield url


PAGES = {
    "fleet": ("/", "nodes online"),
    "over-time": ("/time", "a row is a GPU"),
    "reservations": ("/reservations", "GPUs reserved and idle"),
    "endpoints": ("/endpoints", "chat"),
    "endpoint": ("/endpoints/chat", "Decisions"),
    "recordings": ("/recordings", "nothing was recorded"),
    "health": ("/health", "nothing is wrong"),
}


@pytest.mark.parametrize(("asked", "code"), [("localhost", 200), ("[::1]", 200), ("rebound.example", 400)])
def test_a_page_from_elsewhere_cannot_have_its_name_lead_here(site: str, asked: str, code: int) -> None:
    """Nobody signs in on loopback, so a name that somebody else chose must not be taken for this host."""
    request = Request(site, headers={"Host": f"{asked}:7080"})
    try:
        with urlopen(request) as response:
            found = response.status
    except HTTPError as error:
        found = error.code
    assert found == code


@pytest.mark.parametrize("name", PAGES)
def test_every_page_loads_without_complaint_and_fits_a_phone(browser: Browser, site: str, name: str) -> None:
    path, text = PAGES[name]
    with page_of(browser) as page:
        started = time.monotonic()
        page.goto(site + path)
        page.get_by_text(text).first.wait_for()
        print(f"\n{name}: {time.monotonic() - started:.2f} s")
        page.set_viewport_size({"width": 390, "height": 800})
        eventually_sync(lambda: page.evaluate("document.scrollingElement.scrollWidth") <= 390, timeout=10)


def test_a_reservation_is_seen_without_loading_the_page_again(browser: Browser, up: Up, site: str) -> None:
    with page_of(browser) as page, connect(up.address) as client:
        page.goto(site)
        eventually_sync(lambda: tile(page, "reserved") == "2", timeout=30)
        with client.reserve(gpus=3, holder="<img src=x onerror='window.read=1'>"):
            started = time.monotonic()
            eventually_sync(lambda: tile(page, "reserved") == "5", timeout=30)
            print(f"\nseen after {time.monotonic() - started:.2f} s")
            page.get_by_text("onerror").first.wait_for()
        eventually_sync(lambda: tile(page, "reserved") == "2", timeout=30)
        assert page.evaluate("window.read") is None, "what holders write is text, and no part of the page"


def test_a_page_comes_with_its_data(up: Up, site: str) -> None:
    """What is drawn first needs no second answer."""
    with connect(up.address) as client:
        [node] = client.fleet.ListNodes(monitor_api.ListNodesRequest()).nodes
    uuids = [gpu.uuid for gpu in node.snapshot.gpus]
    assert len(uuids) == 8

    def all_are_there() -> bool:
        with urlopen(site, timeout=30) as answer:
            assert answer.headers["content-security-policy"] == "frame-ancestors 'none'"
            page = answer.read().decode()
        return all(uuid in page for uuid in uuids)

    eventually_sync(all_are_there, timeout=30)


def test_a_gpu_has_charts_of_what_it_read(browser: Browser, site: str) -> None:
    with page_of(browser) as page:
        page.goto(site)
        page.locator("a[href^='/gpus/']").first.click()
        page.get_by_text("a point each").wait_for()
        assert page.locator("canvas").count() == 4


def test_the_filter_finds_by_holder(browser: Browser, site: str) -> None:
    with page_of(browser) as page:
        page.goto(site)
        page.get_by_placeholder("filter").fill("chat")
        eventually_sync(lambda: tile(page, "GPUs") == "2", timeout=30)


def test_an_endpoint_says_why(browser: Browser, site: str) -> None:
    with page_of(browser) as page:
        page.goto(f"{site}/endpoints/chat")
        eventually_sync(lambda: tile(page, "ready") == "2", timeout=60)
        page.get_by_text("stays at 2").first.wait_for()
        page.locator("tbody tr").nth(2).wait_for(timeout=60_000)


def test_it_says_when_nothing_answers(browser: Browser, tmp_path: Path) -> None:
    with Up(tmp_path, simulate=1) as one, dashboard(one.address) as url, page_of(browser) as page:
        page.goto(url)
        page.get_by_text("live", exact=False).first.wait_for()
        one.kill()
        page.get_by_text("· connection lost").wait_for()
        assert tile(page, "GPUs") == "1", "what was heard last stays"


def sign_in(page: Page, name: str) -> None:
    page.get_by_label("Token").fill(name)
    page.get_by_role("button").click()


def test_a_visitor_signs_in_and_acts_as_far_as_the_role_goes(browser: Browser, tmp_path: Path) -> None:
    """A restart signs everybody out: pages that are open find the door again, and do not wait at it for ever."""
    tokens = write_tokens(tmp_path / "tokens.toml", vera="viewer", otto="operator")
    shown = tmp_path / "vera"
    shown.write_text(token("vera"))
    guarded = partial(dashboard, port=free_port())
    flags = ("--sign-in", "--token-file", str(shown))
    with (
        Up(tmp_path, simulate=2, arguments=("--tokens-file", str(tokens))) as up,
        connect(up.address, token=token("otto")) as client,
        page_of(browser, expected="403") as page,
    ):
        lease = client.reserve(gpus=1, holder="somebody", ttl=600.0)
        with guarded(up.address, *flags) as url:
            page.goto(f"{url}/reservations")
            assert page.url == f"{url}/sign-in"
            with page.expect_response(lambda answer: answer.status == 403):
                sign_in(page, "guessed")
            page.get_by_text("Unauthenticated").wait_for()
            sign_in(page, token("vera"))
            page.get_by_role("link", name="Reservations").click()
            page.get_by_role("button", name="release").click()
            page.get_by_role("button", name="Yes").click()
            page.get_by_text("role", exact=False).first.wait_for()
            assert lease.name
            page.get_by_role("button", name="sign out").click()
            sign_in(page, token("otto"))
            page.get_by_role("link", name="Reservations").click()
            page.get_by_role("button", name="release").click()
            page.get_by_role("button", name="Yes").click()
            eventually_sync(lambda: tile(page, "holding") == "0", timeout=30)
            beside = page.context.new_page()
            beside.goto(url)
            beside.get_by_text("live", exact=False).first.wait_for()
            page.get_by_role("button", name="sign out").click()
            beside.wait_for_url(f"{url}/sign-in")
            sign_in(beside, token("vera"))
            beside.get_by_text("live", exact=False).first.wait_for()
            beside.evaluate("window.socket.io.reconnectionDelayMax(100)")
        with guarded(up.address, *flags):
            beside.wait_for_url(f"{url}/sign-in", timeout=30_000)
