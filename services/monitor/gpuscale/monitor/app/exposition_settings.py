"""Settings of whatever shows itself to Prometheus."""

from pydantic import Field

from gpuscale.common.config.settings import ServerSettings
from gpuscale.monitor.exposition.style import HostLabel, Names, Style


class ExpositionSettings(ServerSettings):
    """Settings of `/metrics`; TLS, tokens and the rule for other hosts are those of the program's gRPC server."""

    metrics_listen: str = Field("", description="address of /metrics, HOST:PORT; not served when empty")
    metrics_names: Names = Field(
        "checked",
        description="names of GPU series: checked (all that promtool passes), all, dcgm or gpuscale",
    )
    metrics_host_label: HostLabel = Field(
        "hostname", description="host label of DCGM series: hostname, or Hostname as before 2026-05"
    )

    def style(self, *, many_nodes: bool = False) -> Style:
        """How series are named."""
        return Style(self.metrics_names, self.metrics_host_label, many_nodes)
