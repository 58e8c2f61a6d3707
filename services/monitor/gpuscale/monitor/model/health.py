"""Health checks, findings and events. Pure. Enum numbers are those of the contract."""

from dataclasses import dataclass
from enum import Enum


class HealthCheck(Enum):
    """What is checked."""

    XID = 1
    ECC_UNCORRECTED = 2
    ROW_REMAP_FAILURE = 3
    MEMORY_REPAIR_PENDING = 4
    GPU_LOST = 5
    RESET_REQUIRED = 6
    GPU_HUNG = 7
    RECOVERY_ACTION = 8
    THERMAL_SLOWDOWN = 9
    PCIE_REPLAY = 10
    NVLINK_DOWN = 11
    COLLECTION_STALE = 12
    GPUS_UNREADABLE = 13


class HealthSeverity(Enum):
    """The severity of a finding."""

    INFO = 1
    WARNING = 2
    CRITICAL = 3


class HealthAction(Enum):
    """The recommended action."""

    NONE = 1
    RESTART_WORKLOAD = 2
    DRAIN = 3
    RESET_GPU = 4
    REBOOT_NODE = 5
    CHECK_HARDWARE = 6
    CHECK_AGENT = 7
    CONTACT_SUPPORT = 8


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found. `fatal`: the GPU must not get new work."""

    severity: HealthSeverity
    action: HealthAction
    message: str
    fatal: bool = False


@dataclass(frozen=True, slots=True)
class HealthFacts:
    """The readings that checks use; None if absent, which keeps the last result.

    `state` and `recovery_action` are enum names, such as LOST and NONE.
    """

    state: str
    ecc_uncorrected: int | None = None
    remap_failed: bool | None = None
    remap_pending: bool | None = None
    retired_pending: bool | None = None
    recovery_action: str | None = None
    throttle_reason_mask: int | None = None
    pcie_replays: int | None = None
    nvlinks_active: int | None = None


@dataclass(frozen=True, slots=True)
class QuarantinedGpu:
    """Why a GPU is quarantined, and since when on the fleet's clock."""

    reason: str
    since: float


@dataclass(slots=True)
class Event:
    """A health event. Times are seconds of the fleet's clock."""

    id: str  # sorts in order of time
    check: HealthCheck
    node: str
    uuid: str  # the GPU, in the driver's case; empty for the whole node
    finding: Finding
    started_at: float
    last_at: float
    xid: int | None = None
    resolved_at: float | None = None
    count: int = 1  # occurrences of a fault
    cleared: bool = False  # an admin lifted its quarantine
    boot_id: str = ""  # the boot in which a fault was reported; empty if unknown

    @property
    def quarantines(self) -> bool:
        """Whether it quarantines its GPU."""
        return self.finding.fatal and self.resolved_at is None and not self.cleared and bool(self.uuid)
