"""What can be wrong, how bad it is, and what to do about it. Pure. Numbers of enums are those of the contract."""

from dataclasses import dataclass
from enum import Enum


class HealthCheck(Enum):
    """What was looked at."""

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
    """How bad it is."""

    INFO = 1
    WARNING = 2
    CRITICAL = 3


class HealthAction(Enum):
    """What to do about it."""

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
    """What a check found. `fatal`: the GPU cannot be trusted with new work."""

    severity: HealthSeverity
    action: HealthAction
    message: str
    fatal: bool = False


@dataclass(frozen=True, slots=True)
class HealthFacts:
    """What the checks look at; None is what could not be read, and then a check keeps what it found last.

    `state` is the word of the GPU's state, such as LOST; `recovery_action` that of the driver's wish, such as NONE.
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
    """Why no work should be placed on a GPU, and since when, in seconds of the fleet's clock."""

    reason: str
    since: float


@dataclass(slots=True)
class Event:
    """Something that is, or was, wrong. Times are seconds of the fleet's clock."""

    id: str  # later events sort after earlier ones
    check: HealthCheck
    node: str
    uuid: str  # the GPU, as the driver writes it; empty where the whole node is meant
    finding: Finding
    started_at: float
    last_at: float
    xid: int | None = None
    resolved_at: float | None = None  # None while it lasts
    count: int = 1  # how often it happened, of what happens at moments
    cleared: bool = False  # an admin lifted the quarantine while it lasts
    boot_id: str = ""  # the boot of the node that a fault was reported in; empty where that is not known

    @property
    def quarantines(self) -> bool:
        """Whether it keeps work away from its GPU."""
        return self.finding.fatal and self.resolved_at is None and not self.cleared and bool(self.uuid)
