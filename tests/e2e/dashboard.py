"""The dashboard as a process of its own."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from tests.support.forked import Forked
from tests.support.ports import free_port
from tests.support.up import ctl_environment
from tests.support.waiting import eventually_sync

if TYPE_CHECKING:
    from playwright.sync_api import Page


@contextmanager
def dashboard(gateway: str, *arguments: str, port: int = 0) -> Iterator[str]:
    """Run it; yields its URL. It ends upon SIGTERM, with exit code 0."""
    address = f"127.0.0.1:{port or free_port()}"
    words = ("--gateway-address", gateway, "--listen", address, *arguments)
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        log.touch()
        process = Forked("gpuscale.dashboard.main", words, ctl_environment(), log)
        try:
            eventually_sync(lambda: "serving" in log.read_text() or process.poll() is not None)
            assert process.poll() is None, log.read_text()
            yield f"http://{address}"
            process.send_signal(signal.SIGTERM)
            code, (_, *noise) = process.wait(60), log.read_text().splitlines()
            assert (code, noise) == (0, [])
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


def tile(page: Page, word: str) -> str:
    """The figure above a word."""
    return page.locator(".gs-tile", has_text=word).locator(".gs-number").first.inner_text()
