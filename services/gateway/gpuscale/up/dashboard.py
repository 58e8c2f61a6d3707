"""The dashboard of `up`: a program of its own, started when a browser first asks for it.

`up` holds the listening socket. So the link of the banner works from the first moment, whoever does not look pays nothing for the
pages, and a fault of the dashboard is its own: the next request starts it again.
"""

import asyncio
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from subprocess import PIPE

from gpuscale.common.runtime.logs import get_logger, writes_json
from gpuscale.common.runtime.tasks import TaskScope
from gpuscale.common.secrets import write_link
from gpuscale.up.settings import UpSettings

LINK_FILE = "dashboard-link"
STOP_SECONDS = 4.0
"""Seconds that it has to end: more than the requests that it still answers take."""
PAUSE = 1.0
"""Seconds between its end and the next start."""

_log = get_logger(__name__)


@asynccontextmanager
async def open_dashboard(settings: UpSettings, gateway: str) -> AsyncGenerator[str]:
    """Serve the dashboard of the services at `gateway` until the end of the block; yields the first link to it."""
    try:
        bound = socket.create_server(("127.0.0.1", settings.dashboard_port))
    except OSError:
        bound = socket.create_server(("127.0.0.1", 0))
    with bound:
        file = settings.data_dir / LINK_FILE
        host, port = bound.getsockname()
        link = write_link(file, f"{host}:{port}")
        command = [
            *(sys.executable, "-m", "gpuscale.dashboard.main", "--gateway-address", gateway),
            *("--listen", f"fd:{bound.fileno()}", "--link-file", str(file)),
            *("--log-level", settings.log_level, "--log-format", "json" if writes_json() else "console"),
        ]
        async with TaskScope() as scope:
            scope.spawn("dashboard", _serve(bound, command))
            yield link


async def _serve(bound: socket.socket, command: list[str]) -> None:
    """For ever: wait for a browser, and run the dashboard until it ends."""
    loop = asyncio.get_running_loop()
    while True:
        asked = asyncio.Event()
        loop.add_reader(bound, asked.set)
        try:
            await asked.wait()
        finally:
            loop.remove_reader(bound)
        # The pipe tells it when this process ends, in whatever way.
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, pass_fds=[bound.fileno()])
        try:
            code = await process.wait()
        finally:
            if process.returncode is None:
                process.terminate()
                try:
                    async with asyncio.timeout(STOP_SECONDS):
                        await process.wait()
                except TimeoutError:
                    process.kill()
                    await process.wait()
        _log.warning("the dashboard ended; the next request starts it again", code=code)
        await asyncio.sleep(PAUSE)
