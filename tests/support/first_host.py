"""The services of a first host as `gpuscalectl init` sets them up: fleet and gateway, in the test's process."""

import asyncio
import tomllib
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from gpuscale.gateway.main import serve as serve_gateway
from gpuscale.gateway.settings import GatewaySettings
from gpuscale.monitor.app.fleet import serve as serve_fleet
from gpuscale.monitor.app.settings import FleetSettings
from tests.support.cli import Ran, run_cli
from tests.support.ports import free_port
from tests.support.waiting import eventually


class Site:
    """The services of one host as `init` sets them up: fleet and gateway, as programs."""

    def __init__(self, folder: Path) -> None:
        made = run_cli("init", "--dir", str(folder), "--host", "127.0.0.1")
        assert made.code == 0, made.err
        self.pki, self.admin = folder / "pki", folder / "admin.token"
        self.fleet, self.gateway = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        found = tomllib.loads((folder / "gpuscale.toml").read_text())
        noted = {"audit_file": folder / "audit.jsonl"}
        self.settings = FleetSettings.model_validate({**found["fleet"], "listen": self.fleet, **noted})
        self.gateway_settings = GatewaySettings.model_validate(
            {**found["gateway"], "listen": self.gateway, "fleet_address": self.fleet}
        )

    async def ctl(self, *words: str, stdin: str = "", variables: Mapping[str, str] | None = None) -> Ran:
        # Whoever joins sends no personal token: this one would be an error.
        own = {"GPUSCALE_TOKEN_FILE": "/missing"} if words[0] == "join" else variables
        return await asyncio.to_thread(partial(run_cli, *words, stdin=stdin, environment=own))

    async def as_admin(self, *words: str) -> Ran:
        who = (
            "--address", self.gateway, "--ca-file", str(self.pki / "ca.crt"), "--token-file", str(self.admin),
        )  # fmt: skip
        return await self.ctl(*who, *words)


@asynccontextmanager
async def programs(**running: Any) -> AsyncGenerator[None]:
    """Programs until the block ends: their `serve` with their settings."""
    stop = asyncio.Event()
    tasks = [
        asyncio.create_task(serve(settings, stop), name=name) for name, (serve, settings) in running.items()
    ]
    try:
        yield
    finally:
        stop.set()
        await asyncio.gather(*tasks)


async def _serves(site: Site) -> bool:
    return (await site.as_admin("join-token", "list")).code == 0


@asynccontextmanager
async def first_host(folder: Path) -> AsyncGenerator[Site]:
    """Both programs until the block ends."""
    made = Site(folder)
    async with programs(fleet=(serve_fleet, made.settings), gateway=(serve_gateway, made.gateway_settings)):
        await eventually(partial(_serves, made))
        yield made
