"""The dashboard in a real browser, over a real `up`: it loads, it lives, and it lets in whom it should."""

from __future__ import annotations

import re
import socket
import time
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.client import connect
from gpuscale.common.wire import to_duration
from tests.e2e.browser import page_of
from tests.e2e.dashboard import dashboard, tile
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


CHARTS = {"/endpoints/chat": "Decisions", "/": "nodes online", "/time": "a row is a GPU"}
"""Pages with axes, and what is on them."""


def test_a_browser_that_answers_late_still_gets_its_calendar(browser: Browser, site: str) -> None:
    with page_of(browser) as page:
        page.add_init_script(
            "const send = WebSocket.prototype.send;"
            "WebSocket.prototype.send = function (...told) { setTimeout(() => send.apply(this, told), 3000) }"
        )
        page.goto(f"{site}/bookings")
        page.get_by_text("nothing is booked this week").wait_for()


def test_a_page_from_elsewhere_cannot_have_its_name_lead_here(site: str) -> None:
    """Nobody signs in on loopback, so a name that somebody else chose must not be taken for this host."""
    for asked, code in (("localhost", 200), ("[::1]", 200), ("192.0.2.7", 200), ("rebound.example", 403)):
        assert answer(site, Host=f"{asked}:7080") == code, asked


def test_serving_other_hosts_does_not_let_a_foreign_name_in_either(up: Up) -> None:
    """docker-compose.yml has it so: published on the host's loopback, listening on all addresses of its container."""
    flags = ("--insecure-allow-remote", "--allowed-hosts", "gpus.example")
    with dashboard(up.address, *flags) as url:
        for asked, code in (("127.0.0.1", 200), ("gpus.example", 200), ("rebound.example", 403), ("", 403)):
            assert answer(url, Host=asked) == code, asked


def test_what_a_page_of_another_origin_asks_for_is_refused(site: str) -> None:
    refuses_other_origins(site)


def refuses_other_origins(url: str) -> None:
    """Socket.IO's sockets included, over which a page is steered; a browser cannot leave `Origin` out."""
    for path in ("/", "/_nicegui_ws/socket.io/?EIO=4&transport=polling", "/sign-in"):
        for origin in ("http://evil.example", "null", f"{url}0", "http://127.0.0.1"):
            assert answer(url + path, Origin=origin) == 403, (path, origin)
        assert answer(url + path, Origin=url) != 403, path
    host = url.removeprefix("http://")
    upgrade = (
        "GET /_nicegui_ws/socket.io/?EIO=4&transport=websocket HTTP/1.1\r\nHost: {0}\r\nOrigin: {1}\r\n"
        "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", int(host.rpartition(":")[2])), timeout=30) as wire:
        wire.sendall(upgrade.format(host, "http://evil.example").encode())
        assert wire.recv(64).startswith(b"HTTP/1.1 403")


def answer(url: str, **headers: str) -> int:
    """The status of a GET."""
    try:
        with urlopen(Request(url, headers=headers)) as response:
            return int(response.status)
    except HTTPError as error:
        return error.code


COLOURS = """() => {
  const charts = [...document.querySelectorAll('.nicegui-echart')].map(e => getElement(e.id.slice(1)).chart.getOption());
  const shown = one => one?.show === false ? [] : [one?.lineStyle?.color];
  const lines = charts.flatMap(o => [...o.yAxis.flatMap(y => shown(y.splitLine)), ...o.xAxis.flatMap(x => shown(x.axisLine))]);
  const texts = charts.flatMap(o => [...o.xAxis, ...o.yAxis].map(a => a.axisLabel.color).concat([...o.title ?? [], ...o.legend ?? [], ...o.visualMap ?? []].map(t => t.textStyle.color)));
  return {page: getComputedStyle(document.body).backgroundColor, lines, texts};
}"""


def luminance(colour: str) -> float:
    """Relative luminance by WCAG 2.1, of #rrggbb or rgb(r, g, b); what is transparent is white."""
    if colour.startswith("#"):
        parts = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    else:
        numbers = [float(one) for one in re.findall(r"[\d.]+", colour)]
        parts = [255, 255, 255] if numbers[3:] == [0] else [int(one) for one in numbers[:3]]
    linear = [one / 3294.6 if one <= 10 else ((one / 255 + 0.055) / 1.055) ** 2.4 for one in parts]
    return sum(weight * one for weight, one in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_charts_can_be_read_by_day_and_by_night(browser: Browser, site: str) -> None:
    """WCAG AA on what is drawn: 4.5 to 1 for text, 3 to 1 for axes and the grid. Text beside charts is axe's, over the demo.

    Each page is loaded in the mode that the one before was left in.
    """
    dark = False
    with page_of(browser) as page:

        def can_be_read() -> bool:
            found = page.evaluate(COLOURS)
            assert found["texts"]
            assert (luminance(found["page"]) < 0.1) is dark
            assert too_faint(found) == {}
            return True

        for path, text in CHARTS.items():
            page.goto(site + path)
            page.get_by_text(text).first.wait_for()
            page.wait_for_selector(".nicegui-echart canvas")
            eventually_sync(can_be_read)
            page.evaluate(
                "window.socket.off()"
            )  # deaf to the server: what changes now, the page does by itself
            dark = not dark
            page.emulate_media(color_scheme="dark" if dark else "light")
            eventually_sync(can_be_read)


def too_faint(found: dict[str, Any]) -> dict[str, float]:
    """Colours with less contrast than WCAG AA asks for, with what they have."""
    contrasts = [(colour, contrast(colour, found["page"]), 4.5) for colour in found["texts"]]
    contrasts += [(colour, contrast(colour, found["page"]), 3.0) for colour in found["lines"] if colour]
    return {colour: has for colour, has, least in contrasts if has < least}


def test_a_gpu_with_a_long_holder_stays_within_the_page(browser: Browser, up: Up, site: str) -> None:
    with connect(up.address) as client, client.reserve(gpus=1, holder="team/" + "x" * 240) as lease:
        [held] = lease.reservation.gpus
        node = held.name.split("/")[1]
        with page_of(browser, width=390) as page:
            page.goto(f"{site}/gpus/{node}/{held.uuid}")
            shown = page.get_by_text("x" * 240)
            shown.wait_for()
            assert shown.evaluate("one => one.scrollWidth <= one.clientWidth"), "its end is cut off"
            assert page.evaluate("document.scrollingElement.scrollWidth") <= 390


def test_a_lost_connection_is_said_in_one_line_and_what_was_heard_last_stays(
    browser: Browser, tmp_path: Path
) -> None:
    with Up(tmp_path, simulate=1) as up, dashboard(up.address) as url, page_of(browser, width=390) as page:
        page.goto(url)
        page.get_by_text("live", exact=False).first.wait_for()
        up.kill()
        page.get_by_text("connection lost", exact=True).wait_for()
        assert tile(page, "GPUs") == "1"
        box = page.locator(".gs-line").bounding_box()
        assert box is not None
        assert box["height"] < 40


def test_a_reservation_is_seen_without_loading_the_page_again(browser: Browser, up: Up, site: str) -> None:
    with page_of(browser) as page, connect(up.address) as client:
        page.goto(site)
        eventually_sync(lambda: tile(page, "reserved") == "2")
        with client.reserve(gpus=3, holder="<img src=x onerror='window.read=1'>"):
            started = time.monotonic()
            eventually_sync(lambda: tile(page, "reserved") == "5")
            print(f"\nseen after {time.monotonic() - started:.2f} s")
            page.get_by_text("onerror").first.wait_for()
        eventually_sync(lambda: tile(page, "reserved") == "2")
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

    eventually_sync(all_are_there)


def sign_in(page: Page, name: str) -> None:
    page.get_by_label("Token").fill(name)
    page.get_by_role("button").click()


def release(page: Page) -> None:
    """Go to the only reservation, and release it."""
    page.get_by_role("link", name="Reservations").click()
    page.wait_for_url("**/reservations")
    page.wait_for_function("window.did_handshake")  # the page says nothing of clicks before it is connected
    page.get_by_role("button", name="release").click()
    page.get_by_role("button", name="Yes").click()


def test_a_visitor_signs_in_and_acts_as_far_as_the_role_goes(browser: Browser, tmp_path: Path) -> None:
    """A restart signs everybody out: pages that are open find the door again, and do not wait at it for ever."""
    tokens = write_tokens(tmp_path / "tokens.toml", vera="viewer", olga="operator", otto="operator")
    shown = tmp_path / "vera"
    shown.write_text(token("vera"))
    guarded = partial(dashboard, port=free_port())
    flags = ("--sign-in", "--token-file", str(shown))
    with (
        Up(tmp_path, simulate=2, arguments=("--tokens-file", str(tokens))) as up,
        connect(up.address, token=token("otto")) as client,
        page_of(browser, expected="403") as page,
    ):
        client.reserve(gpus=1, holder="somebody", ttl=600.0)
        with guarded(up.address, *flags) as url:
            refuses_other_origins(url)
            page.goto(f"{url}/reservations")
            assert page.url == f"{url}/sign-in"
            with page.expect_response(lambda answer: answer.status == 403):
                sign_in(page, "guessed")
            page.get_by_text("Unauthenticated").wait_for()
            sign_in(page, token("vera"))
            page.wait_for_function("window.did_handshake")
            page.get_by_text("nodes online").wait_for()
            assert page.get_by_role("button", name="cordon").count() == 0, "who may not is not asked"
            page.get_by_role("button", name="sign out").click()
            sign_in(page, token("olga"))
            page.get_by_role("button", name="cordon").wait_for()
            assert page.get_by_role("button", name="drain").count() == 0
            page.goto(f"{url}/reservations")
            page.get_by_text("somebody").wait_for()
            assert page.get_by_role("button", name="release").count() == 0
            page.get_by_role("button", name="sign out").click()
            sign_in(page, token("otto"))
            release(page)
            eventually_sync(lambda: tile(page, "holding") == "0")
            beside = page.context.new_page()
            beside.goto(url)
            beside.get_by_text("live", exact=False).first.wait_for()
            page.get_by_role("button", name="sign out").click()
            beside.wait_for_url(f"{url}/sign-in")
            sign_in(beside, token("vera"))
            beside.get_by_text("live", exact=False).first.wait_for()
            beside.evaluate("window.socket.io.reconnectionDelayMax(100)")
            page.close()  # a browser rightly complains of a server that goes away under a page
        with guarded(up.address, *flags):
            beside.wait_for_url(f"{url}/sign-in", timeout=30_000)
