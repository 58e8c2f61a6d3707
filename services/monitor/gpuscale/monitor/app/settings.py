"""Settings of the agent and of the fleet."""

import socket
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from pydantic import Field, field_validator, model_validator

from gpuscale.common.config.settings import MetricsSettings, UpstreamSettings, hand_over
from gpuscale.common.names import is_id, to_id
from gpuscale.common.rpc.channel import socket_problem
from gpuscale.monitor.agent.sources import SourceKind
from gpuscale.monitor.app.frame import AgentFrame, ExpositionFrame, by_name
from gpuscale.monitor.history.history import Tier
from gpuscale.monitor.model.prometheus import HostLabel, Names

if TYPE_CHECKING:
    from gpuscale.common.security.certificate_authority import Signer


class ExpositionSettings(ExpositionFrame, MetricsSettings):
    """Settings of `/metrics`."""

    metrics_names: Names = Field(
        "checked",
        description="names of GPU series: checked (those that promtool accepts), all, dcgm or gpuscale",
    )
    metrics_host_label: HostLabel = Field(
        "hostname", description="host label of DCGM series: hostname, or Hostname as before 2026-05"
    )
    metrics_holders: bool = Field(
        default=False,
        description="label GPU series with holder, tenant and hpc_job, from the allocator at allocator_address",
    )


_MOST_LABELS = 64
_LONGEST_NAME = 253


class AgentSettings(AgentFrame, ExpositionSettings, UpstreamSettings):
    """Settings of `gpuscale-agent`; the upstream is the fleet."""

    section: ClassVar[str] = AgentFrame.section

    listen: str = Field("127.0.0.1:7071", description="address to serve on, HOST:PORT")
    node: str = Field(to_id(socket.gethostname()), description="id of this node")
    source: SourceKind = Field(
        "nvml", description="GPUs to read: nvml, simulated, or auto (simulated where there is no driver)"
    )
    simulated_gpu_count: int = Field(4, ge=0, le=1024, description="how many GPUs to simulate")
    isolate: bool = Field(
        default=False, description="read GPUs in a separate process, which is killed when it hangs"
    )
    period_seconds: float = Field(1.0, ge=0.1, le=3600.0, description="seconds between snapshots")
    soft_deadline_seconds: float = Field(2.0, gt=0.0, description="a slower GPU is SLOW")
    hard_deadline_seconds: float = Field(
        10.0, gt=0.0, description="a slower GPU is HUNG; above the soft deadline"
    )
    labels: tuple[str, ...] = Field(
        (),
        description="labels of this node, NAME=VALUE: repeat the flag, or separate with commas in the variable",
    )
    state_dir: Path | None = Field(
        None, description="directory of the fences of admitted work, one per agent; in memory only when empty"
    )
    work_socket: Path | None = Field(
        None,
        description="unix socket on which local programs can have work admitted; only root or the agent may have write access to"
        " its directory",
    )
    killer_socket: Path | None = Field(
        None,
        description="unix socket of gpuscale-killer; while it exists, use policies may kill processes on this host that use GPUs"
        " without a reservation; needs state_dir",
    )
    power_socket: Path | None = Field(
        None,
        description="unix socket of gpuscale-power; while it exists, power budgets and reservations may cap this host's GPUs",
    )
    pod_resources_socket: Path | None = Field(
        None,
        description="unix socket of the kubelet that tells which pods have GPUs, such as"
        " /var/lib/kubelet/pod-resources/kubelet.sock; only root may open it",
    )
    processes_by_user: bool = Field(
        default=False,
        description="assign a process to a reservation if that is the only one with work of its Unix user on the GPU",
    )
    fleet_address: str = Field("", description="fleet to stream to, HOST:PORT; none when empty")
    allocator_address: str = Field(
        "",
        description="allocator that confirms leases before work is admitted, HOST:PORT; fleet_address when empty, which suits a"
        " gateway",
    )

    renew_certificate: bool = Field(
        default=False,
        description="have the fleet renew cert_file before it expires; the file must be writable and hold the key too",
    )

    @field_validator("node")
    @classmethod
    def _check_node(cls, node: str) -> str:
        if not is_id(node):
            raise ValueError("must be 1-63 of a-z, 0-9, '-', '.' and '_', with a letter or digit at the ends")
        return node

    @field_validator("work_socket", "killer_socket", "power_socket", "pod_resources_socket")
    @classmethod
    def _check_socket(cls, path: Path | None) -> Path | None:
        if path is not None and (why := socket_problem(path)):
            raise ValueError(why)
        return path

    @field_validator("labels")
    @classmethod
    def _check_labels(cls, labels: tuple[str, ...]) -> tuple[str, ...]:
        named = by_name(labels)
        if len(named) < len(labels) or len(named) > _MOST_LABELS:
            raise ValueError(f"must be at most {_MOST_LABELS} with unique names")
        for name, value in named.items():  # the rules of the contract
            whole = name == name.strip() and 0 < len(name) <= _LONGEST_NAME and len(value) <= _LONGEST_NAME
            if not whole or not (name + value).isprintable():
                raise ValueError("each must be NAME=VALUE, printable")
        return labels

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.renew_certificate and (self.cert_file is None or self.cert_file != self.key_file):
            raise ValueError("renew_certificate needs one file that is both cert_file and key_file")
        if self.killer_socket is not None and self.state_dir is None:
            raise ValueError("killer_socket needs state_dir: a restart would forget whose work was admitted")
        if self.soft_deadline_seconds >= self.hard_deadline_seconds:
            raise ValueError("soft_deadline_seconds must be below hard_deadline_seconds")
        return self


class FleetSettings(ExpositionSettings, UpstreamSettings):
    """Settings of `gpuscale-fleet`; the upstream is the allocator."""

    section: ClassVar[str] = "fleet"

    listen: str = Field("127.0.0.1:7072", description="address to serve on, HOST:PORT")
    data_dir: Path | None = Field(
        None,
        description="directory of recordings and history, one per fleet; a restart forgets them when empty",
    )
    authority_dir: Path | None = Field(
        None,
        description="directory of ca.crt and ca.key, with which hosts can join and renew certificates; needs data_dir, and"
        " revoked_file with tls_client_ca_file",
    )
    certificate_days: float = Field(7.0, gt=0, le=3650, description="how long signed certificates are valid")
    trust_domain: str = Field(
        "gpuscale.local",
        pattern=r"^[a-z0-9._-]{1,255}$",
        description="trust domain of the identities in signed certificates",
    )
    max_nodes: int = Field(20_000, ge=1, description="maximum number of nodes")
    history_fine_seconds: float = Field(
        600.0, ge=10, le=86_400, description="how long history is kept in steps of 1 s"
    )
    history_medium_seconds: float = Field(
        21_600.0, ge=60, le=604_800, description="how long history is kept in steps of 10 s"
    )
    history_coarse_seconds: float = Field(
        604_800.0, ge=60, le=31_536_000, description="how long history is kept in steps of 1 min"
    )
    history_memory_mib: int = Field(
        1_024, ge=0, description="memory for history, which shortens all tiers if needed; 0 keeps none"
    )
    metrics_max_gpus: int = Field(
        2_000, ge=0, description="with more GPUs, /metrics has no series of single GPUs"
    )
    allocator_address: str = Field("", description="allocator for metrics_holders, HOST:PORT")

    @model_validator(mode="after")
    def _check_authority(self) -> Self:
        if self.authority_dir is None:
            return self
        if self.data_dir is None:
            raise ValueError("authority_dir needs data_dir to remember who joined")
        if self.tls_client_ca_file is not None and self.revoked_file is None:
            raise ValueError("authority_dir needs revoked_file: a revoked host would renew its certificate")
        return self

    def history_tiers(self) -> tuple[Tier, ...]:
        """The tiers of history, finest first."""
        return (
            Tier(1.0, self.history_fine_seconds),
            Tier(10.0, self.history_medium_seconds),
            Tier(60.0, self.history_coarse_seconds),
        )

    def signer(self) -> "Signer | None":
        """The signer of certificates; None without an authority. FailedPreconditionError if it cannot be loaded."""
        if self.authority_dir is None:
            return None
        from gpuscale.common.security.certificate_authority import Signer  # takes 16 MB

        return Signer(
            self.authority_dir,
            self.certificate_days,
            self.trust_domain,
            own=self.tls_cert_file,
            revoked=self.revoked_file,
            tokens_file=self.tokens_file,
        )


if __name__ == "__main__":
    hand_over(AgentSettings, program="gpuscale-agent", description="Reads the GPUs and the host it runs on.")
