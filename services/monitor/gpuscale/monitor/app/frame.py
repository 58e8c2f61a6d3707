"""The settings of agent and fleet as plain classes; `settings` describes and validates the fields."""

from collections.abc import Iterable
from pathlib import Path

from gpuscale.common.config.frame import MetricsPageFrame, ServerFrame, UpstreamFrame
from gpuscale.monitor.agent.sources import SourceKind
from gpuscale.monitor.model.prometheus import HostLabel, Names, Style


class ExpositionFrame(ServerFrame, MetricsPageFrame):
    """A program that shows GPUs on `/metrics`."""

    metrics_names: Names
    metrics_host_label: HostLabel
    metrics_holders: bool

    def style(self, *, many_nodes: bool = False) -> Style:
        """How series are named."""
        return Style(self.metrics_names, self.metrics_host_label, many_nodes)


class AgentFrame(ExpositionFrame, UpstreamFrame):
    """Settings of an agent, which runs without `AgentSettings` since pydantic takes 10 MB of memory."""

    section = "agent"

    node: str
    source: SourceKind
    simulated_gpu_count: int
    isolate: bool
    period_seconds: float
    soft_deadline_seconds: float
    hard_deadline_seconds: float
    labels: tuple[str, ...]
    state_dir: Path | None
    work_socket: Path | None
    killer_socket: Path | None
    power_socket: Path | None
    pod_resources_socket: Path | None
    processes_by_user: bool
    fleet_address: str
    allocator_address: str
    renew_certificate: bool


def by_name(labels: Iterable[str]) -> dict[str, str]:
    """Parse labels of the form NAME=VALUE."""
    return {name: value for name, _, value in (label.partition("=") for label in labels)}
