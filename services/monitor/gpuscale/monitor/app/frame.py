"""What the agent and the fleet are once they have been told how; `settings` describes and checks the fields."""

from collections.abc import Iterable
from pathlib import Path

from gpuscale.common.config.frame import MetricsPageFrame, ServerFrame, UpstreamFrame
from gpuscale.monitor.agent.device import ReadDeadlines
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
    """An agent. It runs on this class: `AgentSettings` needs pydantic, which takes 10 MB of memory."""

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
    full_every_seconds: float
    fleet_address: str
    allocator_address: str
    renew_certificate: bool

    def labels_by_name(self) -> dict[str, str]:
        """The labels of this node."""
        return by_name(self.labels)

    def deadlines(self) -> ReadDeadlines:
        """When a GPU counts as SLOW and as HUNG."""
        return ReadDeadlines(self.soft_deadline_seconds, self.hard_deadline_seconds)


def by_name(labels: Iterable[str]) -> dict[str, str]:
    """Labels by their names, from NAME=VALUE."""
    named: dict[str, str] = {}
    for label in labels:
        name, _, value = label.partition("=")
        named[name] = value
    return named
