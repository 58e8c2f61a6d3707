"""Health checks of one GPU, by its facts and its past. Pure.

A check returns a finding, or None if all is well. Without the readings it needs it returns nothing, and its last result stands.
"""

from collections.abc import Callable, Mapping
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


ANSWERING = frozenset({"OK", "DEGRADED", "DIVIDED"})
AWAY = frozenset({"LOST", "RESET_REQUIRED", "RELEASED"})
"""States after which a GPU that answers again was reset, or its driver reloaded."""

SOFTWARE_THERMAL, HARDWARE_THERMAL, POWER_BRAKE = 0x20, 0x40, 0x80
"""Bits of NVML's clocks event reasons."""

Results = dict[HealthCheck, Finding | None]

_WARNING, _CRITICAL = HealthSeverity.WARNING, HealthSeverity.CRITICAL
_LOST = Finding(_CRITICAL, HealthAction.REBOOT_NODE, "the GPU is gone from the bus", fatal=True)
_RESET = Finding(_CRITICAL, HealthAction.RESET_GPU, "the GPU asks for a reset", fatal=True)
_HUNG = Finding(_CRITICAL, HealthAction.RESET_GPU, "a call to the driver does not come back", fatal=True)
_REMAP_FAILED = Finding(
    _CRITICAL, HealthAction.CONTACT_SUPPORT, "a row of memory could not be replaced", fatal=True
)
_REPAIR = Finding(_WARNING, HealthAction.RESET_GPU, "memory with errors waits for a reset to be replaced")
_ECC = Finding(_CRITICAL, HealthAction.RESET_GPU, "memory errors could not be corrected", fatal=True)
_BRAKE = Finding(_WARNING, HealthAction.CHECK_HARDWARE, "the power brake holds clocks down")
_HOT = Finding(_WARNING, HealthAction.CHECK_HARDWARE, "heat holds clocks down")
_RECOVERY: Mapping[str, Finding] = {
    "GPU_RESET": Finding(
        _CRITICAL, HealthAction.RESET_GPU, "the driver asks for a reset of the GPU", fatal=True
    ),
    "NODE_REBOOT": Finding(_CRITICAL, HealthAction.REBOOT_NODE, "the driver asks for a reboot", fatal=True),
    "DRAIN_PEERS": Finding(
        _CRITICAL, HealthAction.DRAIN, "the driver asks to drain work between GPUs", fatal=True
    ),
    "DRAIN_AND_RESET": Finding(
        _CRITICAL, HealthAction.DRAIN, "the driver asks to drain, then reset", fatal=True
    ),
    "OTHER": Finding(_WARNING, HealthAction.CONTACT_SUPPORT, "the driver asks for an unknown action"),
}


@dataclass(frozen=True, slots=True)
class HoldTimes:
    """Seconds that a finding must last to raise an event, and must be gone to resolve it."""

    raise_after: float
    resolve_after: float


HOLDS: Mapping[HealthCheck, HoldTimes] = {
    **dict.fromkeys(HealthCheck, HoldTimes(0.0, 30.0)),
    HealthCheck.GPU_LOST: HoldTimes(2.0, 30.0),
    HealthCheck.THERMAL_SLOWDOWN: HoldTimes(10.0, 60.0),
    HealthCheck.PCIE_REPLAY: HoldTimes(0.0, 120.0),
    HealthCheck.NVLINK_DOWN: HoldTimes(5.0, 30.0),
    HealthCheck.COLLECTION_STALE: HoldTimes(2.0, 5.0),
    HealthCheck.GPUS_UNREADABLE: HoldTimes(10.0, 5.0),
}
"""Hold times avoid flapping events and delay trust in a GPU that comes back."""


def state_results(facts: HealthFacts) -> Results:
    """Check for LOST, RESET_REQUIRED and HUNG. A released or slow GPU says nothing about them."""
    lost, reset, hung = HealthCheck.GPU_LOST, HealthCheck.RESET_REQUIRED, HealthCheck.GPU_HUNG
    if facts.state in ANSWERING:
        return {lost: None, reset: None, hung: None}
    if facts.state == "LOST":
        return {lost: _LOST, hung: None}
    if facts.state == "RESET_REQUIRED":
        return {lost: None, reset: _RESET, hung: None}
    return {hung: _HUNG} if facts.state == "HUNG" else {}


def memory_results(facts: HealthFacts) -> Results:
    """Check for uncorrected memory errors and pending or failed repairs."""
    found: Results = {}
    if facts.ecc_uncorrected is not None:
        found[HealthCheck.ECC_UNCORRECTED] = _ECC if facts.ecc_uncorrected > 0 else None
    if facts.remap_failed is not None:
        found[HealthCheck.ROW_REMAP_FAILURE] = _REMAP_FAILED if facts.remap_failed else None
    pending = [flag for flag in (facts.remap_pending, facts.retired_pending) if flag is not None]
    if pending:
        found[HealthCheck.MEMORY_REPAIR_PENDING] = _REPAIR if any(pending) else None
    return found


def recovery_results(facts: HealthFacts) -> Results:
    """Check for a recovery action that the driver asks for."""
    if facts.recovery_action is None:
        return {}
    return {HealthCheck.RECOVERY_ACTION: _RECOVERY.get(facts.recovery_action)}


def thermal_results(facts: HealthFacts) -> Results:
    """Check for clocks throttled by heat or the power brake."""
    mask = facts.throttle_reason_mask
    if mask is None:
        return {}
    hot = _HOT if mask & (SOFTWARE_THERMAL | HARDWARE_THERMAL) else None
    return {HealthCheck.THERMAL_SLOWDOWN: _BRAKE if mask & POWER_BRAKE else hot}


CHECKS: tuple[Callable[[HealthFacts], Results], ...] = (
    state_results,
    memory_results,
    recovery_results,
    thermal_results,
)


def results(facts: HealthFacts) -> Results:
    """The results of all checks that do not need the past."""
    return {check: finding for look_at in CHECKS for check, finding in look_at(facts).items()}


REPLAY_WINDOW_SECONDS = 60.0
MOST_REPLAYS_PER_MINUTE = 30


@dataclass(slots=True)
class Past:
    """Earlier readings of one GPU."""

    replays: int | None = None
    replays_at: float = 0.0
    most_links: int = 0


def past_results(past: Past, facts: HealthFacts, now: float) -> Results:
    """The results of checks that compare facts with the past, which is updated.

    A GPU that was away starts over, as its counters do.
    """
    if facts.state in AWAY:
        past.replays, past.most_links = None, 0
        return {}
    found: Results = {}
    replays = facts.pcie_replays
    if replays is not None:
        if past.replays is None or replays < past.replays:
            past.replays, past.replays_at = replays, now
        passed = now - past.replays_at
        if passed >= REPLAY_WINDOW_SECONDS:
            per_minute = (replays - past.replays) * 60.0 / passed
            past.replays, past.replays_at = replays, now
            message = f"{per_minute:.0f} PCIe packets a minute have to be sent again"
            finding = Finding(HealthSeverity.WARNING, HealthAction.CHECK_HARDWARE, message)
            found[HealthCheck.PCIE_REPLAY] = finding if per_minute > MOST_REPLAYS_PER_MINUTE else None
    if facts.nvlinks_active is not None:
        past.most_links = max(past.most_links, facts.nvlinks_active)
        down = past.most_links - facts.nvlinks_active
        message = f"{down} of {past.most_links} NVLinks that were up {'is' if down == 1 else 'are'} down"
        finding = Finding(HealthSeverity.WARNING, HealthAction.RESET_GPU, message)
        found[HealthCheck.NVLINK_DOWN] = finding if down else None
    return found
