"""Settings of `gpuscale-allocator`; `gpuscale.common.config.settings` says where they come from."""

import ssl
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from gpuscale.allocator.domain.notifications import networks
from gpuscale.allocator.queueing.model import Rules
from gpuscale.common.config.settings import StatefulSettings


class AllocatorSettings(StatefulSettings):
    """Settings of the allocator."""

    section: ClassVar[str] = "allocator"

    listen: str = Field("127.0.0.1:7073", description="address to serve on, HOST:PORT")
    data_dir: Path = Field(description="directory of the reservations, for one allocator")
    fleet_address: str = Field("127.0.0.1:7072", description="address of the fleet, HOST:PORT")
    default_min_memory_mib: int = Field(
        8000, ge=0, description="default minimum of free memory of a GPU, in MiB"
    )
    default_max_utilization_percent: float = Field(
        50.0, gt=0, le=100, description="default utilization that a GPU must be below"
    )
    default_ttl_seconds: float = Field(300.0, ge=2, le=604_800, description="default length of a lease")
    default_policy: Literal["spread", "pack", "bestfit", "firstfit", "fgd"] = Field(
        "spread", description="default policy for picking GPUs"
    )
    lost_after_seconds: float = Field(
        10.0,
        ge=1,
        le=86_400,
        description="how long a reserved GPU may be missing from its node's snapshots before its reservation becomes LOST",
    )
    ended_max_records: int = Field(
        1_000_000,
        ge=0,
        description="most ended reservations to keep; beyond it, their request ids may be granted again",
    )
    ended_max_mib: int = Field(
        1024,
        ge=1,
        description="most disk space for ended reservations, in MiB; those that ended first are dropped first",
    )
    usage_keep_days: int = Field(
        1830, ge=100, le=36_500, description="days to keep usage records; some 0.4 MB per GPU and year"
    )
    fences_above: int = Field(
        0,
        ge=0,
        le=2**62,
        description="give only fences above this one; after a restore, set it above all given since the backup",
    )
    max_waiting: int = Field(1000, ge=0, le=100_000, description="most requests in the queue")
    preemption_min_runtime_seconds: float = Field(
        300.0, ge=0, le=604_800, description="how long a reservation must have run before it may be preempted"
    )
    preemption_grace_seconds: float = Field(
        30.0, ge=0, le=86_400, description="grace of a preempted reservation"
    )
    rebalance_moves_per_hour: int = Field(
        0,
        ge=0,
        le=100_000,
        description="most automatic moves per hour of movable reservations, to make room for the queue; 0: only by ApplyRebalance",
    )
    booking_horizon_seconds: float = Field(
        86_400.0,
        ge=600,
        le=31_536_000,
        description="assumed length of a lease without a time limit; bookings that start later take precedence",
    )
    notify_networks: tuple[str, ...] = Field(
        (), description="networks of private addresses to which notifications may be sent, such as 10.0.0.0/8"
    )
    notify_ca_file: Path | None = Field(
        None, description="authority of targets of notifications, PEM, trusted beside the public ones"
    )
    past_use_half_life_days: float = Field(
        0.0,
        ge=0,
        le=365,
        description="half-life in days of past use in the fair share of a tenant; 0: past use does not count",
    )
    memory_weight: float = Field(0.6, ge=0, le=1000, description="weight of free memory in the spread score")
    utilization_weight: float = Field(
        0.4, ge=0, le=1000, description="weight of idleness in the spread score"
    )

    @field_validator("notify_networks")
    @classmethod
    def _check_networks(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        networks(texts)
        return texts

    @field_validator("notify_ca_file")
    @classmethod
    def _check_authority(cls, path: Path | None) -> Path | None:
        try:
            ssl.create_default_context(cafile=path)
        except OSError as error:  # ssl.SSLError is one
            raise ValueError(f"cannot use the certificates in {path}: {error.strerror}") from None
        return path

    def queue_rules(self) -> Rules:
        """The queue's settings."""
        return Rules(
            max_waiting=self.max_waiting,
            min_runtime=self.preemption_min_runtime_seconds,
            grace=self.preemption_grace_seconds,
            past_counts=self.past_use_half_life_days > 0,
        )

    def notifying(self) -> tuple[tuple[str, ...], Path | None]:
        """The private networks to which notifications may be sent, and the authority of their targets."""
        return self.notify_networks, self.notify_ca_file

    def rebalancing(self) -> tuple[float, float, int]:
        """The least age of what moves, the grace of preemptible moves, and the most moves per hour."""
        return (
            self.preemption_min_runtime_seconds,
            self.preemption_grace_seconds,
            self.rebalance_moves_per_hour,
        )
