"""A real browser: Debian's Chromium, driven by Playwright. Without a screen its headless shell does, for fewer seconds of CPU."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from tests.support.fixtures import need

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Request

# The machine has no screen and may have no network: nothing but the page is asked for.
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start it; skips the test where there is none, but fails in CI."""
    program = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if program is None:
        need("Chromium is not installed (Debian: chromium-headless-shell; tools/install_test_servers.sh)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def page_of(
    browser: Browser, *, width: int = 1280, height: int = 800, expected: str = "", zone: str = "Asia/Tokyo"
) -> Iterator[Page]:
    """A page of its own, as of a new visitor; whatever the browser complains of, but for what is `expected`, fails."""
    complaints: list[str] = []
    context = browser.new_context(
        viewport={"width": width, "height": height},
        ignore_https_errors=True,
        color_scheme="light",
        timezone_id=zone,
    )
    page = context.new_page()
    page.set_default_timeout(60_000)
    page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
    page.on(
        "console",
        lambda message: complaints.append(message.text) if message.type in {"error", "warning"} else None,
    )

    def failed(request: Request) -> None:
        if request.failure != "net::ERR_ABORTED":  # the page was left while that loaded
            complaints.append(f"not loaded: {request.url}: {request.failure}")

    page.on("requestfailed", failed)
    try:
        yield page
    except Exception:
        with suppress(Exception):  # the browser may be gone
            print(page.url, page.inner_text("body", timeout=5_000), *complaints, sep="\n")
        raise
    finally:
        context.close()
    unexpected = [text for text in complaints if not expected or expected not in text]
    assert not unexpected, unexpected
