"""The dashboard as a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.support.ports import free_port
from tests.support.up import ctl_environment

if TYPE_CHECKING:
    from playwright.sync_api import Page


@contextmanager
def dashboard(gateway: str, *arguments: str, port: int = 0) -> Iterator[str]:
    """Run it; yields its URL. It ends upon SIGTERM, with exit code 0."""
    address = f"127.0.0.1:{port or free_port()}"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "gpuscale.dashboard.main"),
            *("--gateway-address", gateway, "--listen", address, *arguments),
        ],
        env=ctl_environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        assert "serving" in process.stderr.readline()
        yield f"http://{address}"
        process.send_signal(signal.SIGTERM)
        _, noise = process.communicate(timeout=60)
        assert (process.returncode, noise) == (0, ""), f"exit code {process.returncode}: {noise}"
    finally:
        process.kill()
        process.communicate()


def tile(page: Page, word: str) -> str:
    """The figure above a word."""
    return page.locator(".gs-tile", has_text=word).locator(".gs-number").first.inner_text()
