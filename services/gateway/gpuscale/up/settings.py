"""Settings of `gpuscalectl up`: its own, and those of every program it runs.

All share one configuration file, each with its own table. What `up` decides itself, such as where state is stored, it passes on as
overrides.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from gpuscale.allocator import settings as allocator
from gpuscale.autoscaler import settings as autoscaler
from gpuscale.autoscaler.adapters.engines.process import engine as processes
from gpuscale.common.config import sources
from gpuscale.common.config.frame import Level
from gpuscale.common.config.settings import (
    DatabaseSettings,
    ListenerSettings,
    ProgramSettings,
    ServerSettings,
    UpstreamSettings,
)
from gpuscale.common.rpc import audit
from gpuscale.common.rpc import server as rpc_server
from gpuscale.gateway import settings as gateway
from gpuscale.monitor.app import settings as monitor

PROGRAM = "gpuscalectl up"
SECURITY = {*ListenerSettings.model_fields} - {*ProgramSettings.model_fields}
"""Settings of `up` that also apply to what a part serves itself, such as /metrics."""
SHARED = {*ServerSettings.model_fields, *UpstreamSettings.model_fields, *DatabaseSettings.model_fields}
"""Settings of a part that `up` ignores: how it is reached, how it reaches others, and where its database is."""
DEMO_GPUS = 2
"""GPUs of this host in the demo, which the demo's people leave free."""
DESCRIPTION = (
    "Start everything on this machine, in one process: agent, fleet, allocator, autoscaler, worker adapter."
)


class UpSettings(ServerSettings):
    """The settings of `up`."""

    section: ClassVar[str] = "up"

    listen: str = Field("127.0.0.1:7070", description="address to serve on, HOST:PORT")
    data_dir: Path = Field(
        default_factory=lambda: (
            Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "gpuscale"
        ),
        description="directory of all state, not shared with another `up`; $XDG_DATA_HOME/gpuscale or ~/.local/share/gpuscale when not set",
    )
    simulate: int | None = Field(
        None, ge=0, le=1024, description="simulate this many GPUs instead of reading the host's"
    )
    dashboard: bool = Field(default=True, description="serve the dashboard to browsers on this host")
    dashboard_port: int = Field(
        7080, ge=0, le=65535, description="port of the dashboard on 127.0.0.1; a free one where it is in use"
    )
    demo: bool = Field(
        default=False,
        description="add simulated hosts, people and endpoints to try gpuscale with; without data_dir, state is kept in gpuscale-demo beside the directory of real state",
    )
    demo_speed: float = Field(
        10.0, ge=1, le=600, description="how many times faster than real time the demo's day runs"
    )
    demo_seed: int = Field(1, ge=0, description="seed of the demo: the same seed gives the same events")
    log_level: Level = Field("warning", description="least level that is logged")
    reflection: bool = Field(default=True, description="serve gRPC reflection")
    audit_file: Path | None = Field(
        None,
        description="file of the audit log, JSON lines; - for standard output; audit.jsonl in the data directory when not set",
    )

    def serves_dashboard(self) -> bool:
        """Whether to serve the dashboard: it is wanted and installed, and neither tokens nor TLS are in use."""
        unasked = self.tokens_file is None and self.tls_cert_file is None
        return self.dashboard and unasked and find_spec("nicegui") is not None

    def server_options(self) -> rpc_server.ServerOptions:
        """The options of the server, with the audit log on."""
        options = super().server_options()
        own = audit.AuditOptions(self.data_dir / "audit.jsonl", self.audit_max_mib << 20)
        return replace(options, audit=options.audit or own)


@dataclass(frozen=True)
class AllSettings:
    """The settings of every part."""

    up: UpSettings
    agent: monitor.AgentSettings
    fleet: monitor.FleetSettings
    allocator: allocator.AllocatorSettings
    autoscaler: autoscaler.AutoscalerSettings
    adapter: processes.ProcessSettings


def load_all(argv: Sequence[str]) -> AllSettings:
    """Load the settings from flags (of `up`), environment and file.

    Exits with 2 and one line on stderr if a flag or a setting of `up` itself is unknown or invalid.

    Raises InvalidArgumentError: a setting of another part is unknown or invalid, or would have no effect.
    """
    up = sources.load(UpSettings, argv, program=PROGRAM, description=DESCRIPTION)
    if up.demo:
        own = up.data_dir if "data_dir" in up.model_fields_set else up.data_dir.with_name("gpuscale-demo")
        gpus = DEMO_GPUS if up.simulate is None else up.simulate
        up = up.model_copy(update={"data_dir": own, "simulate": gpus})
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default=os.environ.get(sources.CONFIG_VARIABLE))
    path: str | None = parser.parse_known_args(argv)[0].config
    # the file that `load` used
    config: Mapping[str, object] = sources.read_config(Path(path)) if path else {}
    _refuse_unused(config)
    state = {"data_dir": up.data_dir}
    simulated = {} if up.simulate is None else {"source": "simulated", "simulated_gpu_count": up.simulate}
    secured = up.model_dump(include=SECURITY)
    kept = {"state_dir": up.data_dir / "agent"}
    table = config.get("agent", {})
    if sources.is_table(table):  # simulate GPUs if the host has no driver
        config = {**config, "agent": {"source": "auto", **table}}
    agent = sources.load_table(monitor.AgentSettings, config, {**secured, **simulated, **kept})
    return AllSettings(
        up=up,
        agent=agent,
        fleet=sources.load_table(monitor.FleetSettings, config, {**secured, **state}),
        allocator=sources.load_table(allocator.AllocatorSettings, config, state),
        autoscaler=sources.load_table(autoscaler.AutoscalerSettings, config, state),
        adapter=sources.load_table(
            processes.ProcessSettings, config, {**state, "node": agent.node, "end_replicas": True}
        ),
    )


def _refuse_unused(config: Mapping[str, object]) -> None:
    parts: dict[type[sources.Settings], set[str]] = {
        monitor.AgentSettings: SHARED | {"state_dir", "renew_certificate", "work_socket"},
        monitor.FleetSettings: SHARED | {"data_dir"},
        allocator.AllocatorSettings: SHARED | {"data_dir", "metrics_listen"},
        autoscaler.AutoscalerSettings: SHARED | {"data_dir", "metrics_listen"},
        processes.ProcessSettings: SHARED | {"data_dir", "metrics_listen", "node", "end_replicas"},
        gateway.GatewaySettings: set(gateway.GatewaySettings.model_fields),
    }
    for part, shared in parts.items():
        instead: dict[str, str] = {}
        for name in shared | {name for name in part.model_fields if name.endswith("_address")}:
            if name in UpSettings.model_fields:
                instead[name] = f"set {name} in [up]"
            elif name == "node":
                instead[name] = "set node in [agent]"
            elif name.startswith("metrics_"):
                instead[name] = f"{PROGRAM} runs every part in one process; set {name} in [agent] or [fleet]"
            else:
                instead[name] = f"{PROGRAM} runs every part in one process; remove it"
        sources.refuse_unused(part, config, instead)
