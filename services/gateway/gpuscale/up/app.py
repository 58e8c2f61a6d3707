"""Runs every program's app on one server, in one process and one event loop.

The apps call each other as they would between hosts, over a unix socket with a token of their own. They end in reverse order: the
adapter's workers first, while the services they report to still run.

The dashboard is a separate program, started on the first request of a browser. `up` holds the listening socket, so the link in the
banner works at once, an unused dashboard costs nothing, and a crash of the dashboard stays its own.
"""

import asyncio
import logging
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from secrets import token_hex, token_urlsafe
from subprocess import PIPE

import grpc
from pydantic import SecretStr

from gpuscale.allocator.app import KNOWN_INTERVAL, open_allocator, until_known
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types.v1 import Snapshot
from gpuscale.autoscaler.adapters.main import open_adapter
from gpuscale.autoscaler.app import open_autoscaler
from gpuscale.common.errors import UnavailableError
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.rpc.server import Server
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.runtime.lifecycle import DirectoryLock
from gpuscale.common.runtime.logs import get_logger, writes_json
from gpuscale.common.runtime.tasks import SystemClock, TaskScope
from gpuscale.common.secrets import write_link
from gpuscale.monitor.app.agent import open_agent
from gpuscale.monitor.app.fleet import open_fleet
from gpuscale.up.settings import AllSettings, UpSettings

STOP_GRACE = 1.0
"""Seconds for calls to finish. Of the 9.5 seconds for the whole process, the adapter's workers take up to 6 before, and ending the
remaining calls up to 2.1 after."""
START_SECONDS = 60.0
"""Seconds until the fleet and the allocator must know this host."""


@dataclass(frozen=True)
class Running:
    """The running services."""

    address: str  # where the server listens, with its actual port
    snapshot: Snapshot  # first snapshot of this host
    dashboard: str = ""  # link to the dashboard; empty if not served


@asynccontextmanager
async def open_all(settings: AllSettings) -> AsyncGenerator[Running]:
    """Run everything until the end of the block; yields once the services answer.

    Raises:
        FailedPreconditionError: the address or the data directory is in use, or cannot be used.
        GpuscaleError: a part failed to start.
    """
    clock, root = SystemClock(), logging.getLogger()
    async with AsyncExitStack() as stack:
        stack.callback(root.setLevel, root.level)
        stack.enter_context(DirectoryLock(settings.up.data_dir))
        socket = f"gpuscale-{token_hex(16)}"
        options = replace(settings.up.server_options(), internal_socket=socket)
        token = SecretStr(token_urlsafe(32))  # kept in memory, since replicas run as the same user
        server = Server(options, settings.up.authenticator(token))
        address = server.bind()
        own = await stack.enter_async_context(open_channel(f"unix-abstract:{socket}", token=token))
        server.add(
            *await stack.enter_async_context(open_fleet(settings.fleet, clock=clock, allocator=own)),
            *await stack.enter_async_context(
                open_agent(settings.agent, fleet=own, allocator=own, clock=clock)
            ),
            *await stack.enter_async_context(open_allocator(settings.allocator, fleet=own, clock=clock)),
            *await stack.enter_async_context(
                open_autoscaler(settings.autoscaler, fleet=own, allocator=own, clock=clock)
            ),
        )
        stack.push_async_callback(server.stop, STOP_GRACE)
        # When the server ends, the parts lose each other, which is no reason for warnings.
        stack.callback(root.setLevel, logging.ERROR)
        await server.start()
        # From here on the agent knows its GPUs, and can admit work; users can reserve as soon as they see the banner.
        snapshot = await _first_snapshot(own)
        await stack.enter_async_context(
            open_adapter(settings.adapter, autoscaler=own, agent=own, clock=clock)
        )
        if settings.up.demo:
            from gpuscale.up.demo import open_demo  # loaded only if wanted

            await stack.enter_async_context(
                open_demo(own, speed=settings.up.demo_speed, seed=settings.up.demo_seed)
            )
        dashboard = ""
        if settings.up.serves_dashboard():
            dashboard = await stack.enter_async_context(open_dashboard(settings.up, address))
        yield Running(address, snapshot, dashboard)


async def _first_snapshot(own: grpc.aio.Channel) -> Snapshot:
    """The first snapshot of this host, once fleet and allocator have it. Raises UnavailableError: they do not within START_SECONDS (NO_TELEMETRY)."""
    fleet = monitor_api.FleetServiceStub(own)
    try:
        async with asyncio.timeout(START_SECONDS):
            while True:
                with suppress(UnavailableError), rpc_errors():
                    nodes = (await fleet.ListNodes(monitor_api.ListNodesRequest())).nodes
                    for node in (one for one in nodes if one.HasField("snapshot")):
                        if node.snapshot.gpus:
                            await until_known(own, {node.name: 0})
                        return node.snapshot
                await asyncio.sleep(KNOWN_INTERVAL)
    except TimeoutError as error:
        message = f"no snapshot of this host within {START_SECONDS:g} s"
        raise UnavailableError(message, reason="NO_TELEMETRY") from error


LINK_FILE, CALENDAR_FILE = "dashboard-link", "dashboard-calendar"
STOP_SECONDS = 4.0
"""Seconds for it to end: more than its pending requests take."""
PAUSE = 1.0
"""Seconds between its end and a restart."""

_log = get_logger(__name__)


@asynccontextmanager
async def open_dashboard(settings: UpSettings, gateway: str) -> AsyncGenerator[str]:
    """Serve a dashboard of the services at `gateway` until the end of the block; yields the first sign-in link."""
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
            *("--calendar-file", str(settings.data_dir / CALENDAR_FILE)),
            *("--log-level", settings.log_level, "--log-format", "json" if writes_json() else "console"),
        ]
        async with TaskScope() as scope:
            scope.spawn("dashboard", _serve(bound, command))
            yield link


async def _serve(bound: socket.socket, command: list[str]) -> None:
    """For ever: wait for a browser, then run the dashboard until it ends."""
    loop = asyncio.get_running_loop()
    while True:
        asked = asyncio.Event()
        loop.add_reader(bound, asked.set)
        try:
            await asked.wait()
        finally:
            loop.remove_reader(bound)
        # The pipe closes when this process ends, however it ends.
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
