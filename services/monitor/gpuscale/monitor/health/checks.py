"""What the facts of one GPU say, check by check. Pure.

A check that finds nothing wrong gives None. One that cannot tell, since what it needs was not read, gives nothing at
all: then its last result stands.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpuscale.monitor.model.health import Action, Finding, GpuFacts, HealthCheck, HealthSeverity

ANSWERING = frozenset({"OK", "DEGRADED", "DIVIDED"})
AWAY = frozenset({"LOST", "RESET_REQUIRED", "RELEASED"})
"""A GPU in one of these states that answers later was reset, or the driver was loaded again."""

SOFTWARE_THERMAL, HARDWARE_THERMAL, POWER_BRAKE = 0x20, 0x40, 0x80
"""Bits of NVML's clocks event reasons."""

Results = dict[HealthCheck, Finding | None]

_WARNING, _CRITICAL = HealthSeverity.WARNING, HealthSeverity.CRITICAL
_LOST = Finding(_CRITICAL, Action.REBOOT_NODE, "the GPU is gone from the bus", fatal=True)
_RESET = Finding(_CRITICAL, Action.RESET_GPU, "the GPU asks for a reset", fatal=True)
_HUNG = Finding(_CRITICAL, Action.RESET_GPU, "a call to the driver does not come back", fatal=True)
_REMAP_FAILED = Finding(
    _CRITICAL, Action.CONTACT_SUPPORT, "a row of memory could not be replaced", fatal=True
)
_REPAIR = Finding(_WARNING, Action.RESET_GPU, "memory with errors waits for a reset to be replaced")
_ECC = Finding(_CRITICAL, Action.RESET_GPU, "memory errors could not be corrected", fatal=True)
_BRAKE = Finding(_WARNING, Action.CHECK_HARDWARE, "the power brake holds clocks down")
_HOT = Finding(_WARNING, Action.CHECK_HARDWARE, "heat holds clocks down")
_RECOVERY: Mapping[str, Finding] = {
    "GPU_RESET": Finding(_CRITICAL, Action.RESET_GPU, "the driver asks for a reset of the GPU", fatal=True),
    "NODE_REBOOT": Finding(_CRITICAL, Action.REBOOT_NODE, "the driver asks for a reboot", fatal=True),
    "DRAIN_PEERS": Finding(_CRITICAL, Action.DRAIN, "the driver asks to drain work between GPUs", fatal=True),
    "DRAIN_AND_RESET": Finding(_CRITICAL, Action.DRAIN, "the driver asks to drain, then reset", fatal=True),
    "OTHER": Finding(
        _WARNING, Action.CONTACT_SUPPORT, "the driver asks for an action that is not known here"
    ),
}


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a finding must last until it is an event, and how long it must be gone until that is resolved; seconds."""

    raise_after: float
    resolve_after: float


PATIENCE: Mapping[HealthCheck, Patience] = {
    HealthCheck.XID: Patience(0.0, 30.0),
    HealthCheck.ECC_UNCORRECTED: Patience(0.0, 30.0),
    HealthCheck.ROW_REMAP_FAILURE: Patience(0.0, 30.0),
    HealthCheck.MEMORY_REPAIR_PENDING: Patience(0.0, 30.0),
    HealthCheck.GPU_LOST: Patience(2.0, 30.0),
    HealthCheck.RESET_REQUIRED: Patience(0.0, 30.0),
    HealthCheck.GPU_HUNG: Patience(0.0, 30.0),
    HealthCheck.RECOVERY_ACTION: Patience(0.0, 30.0),
    HealthCheck.THERMAL_SLOWDOWN: Patience(10.0, 60.0),
    HealthCheck.PCIE_REPLAY: Patience(0.0, 120.0),
    HealthCheck.NVLINK_DOWN: Patience(5.0, 30.0),
    HealthCheck.COLLECTION_STALE: Patience(2.0, 5.0),
    HealthCheck.GPUS_UNREADABLE: Patience(10.0, 5.0),
}
"""So that what flickers is one event, and a GPU that comes back is trusted a while later."""


def state_results(facts: GpuFacts) -> Results:
    """LOST, RESET_REQUIRED and HUNG exclude each other; a released or slow GPU says nothing about them."""
    lost, reset, hung = HealthCheck.GPU_LOST, HealthCheck.RESET_REQUIRED, HealthCheck.GPU_HUNG
    if facts.state in ANSWERING:
        return {lost: None, reset: None, hung: None}
    if facts.state == "LOST":
        return {lost: _LOST, hung: None}
    if facts.state == "RESET_REQUIRED":
        return {lost: None, reset: _RESET, hung: None}
    return {hung: _HUNG} if facts.state == "HUNG" else {}


def memory_results(facts: GpuFacts) -> Results:
    """Errors that could not be corrected, and what the GPU does about them."""
    found: Results = {}
    if facts.ecc_uncorrected is not None:
        found[HealthCheck.ECC_UNCORRECTED] = _ECC if facts.ecc_uncorrected > 0 else None
    if facts.remap_failed is not None:
        found[HealthCheck.ROW_REMAP_FAILURE] = _REMAP_FAILED if facts.remap_failed else None
    pending = [one for one in (facts.remap_pending, facts.retired_pending) if one is not None]
    if pending:
        found[HealthCheck.MEMORY_REPAIR_PENDING] = _REPAIR if any(pending) else None
    return found


def recovery_results(facts: GpuFacts) -> Results:
    """What the driver wants done to the GPU."""
    if facts.recovery_action is None:
        return {}
    return {HealthCheck.RECOVERY_ACTION: _RECOVERY.get(facts.recovery_action)}


def thermal_results(facts: GpuFacts) -> Results:
    """Whether clocks are held down by what cooling or power supply should have prevented."""
    mask = facts.throttle_reason_mask
    if mask is None:
        return {}
    hot = _HOT if mask & (SOFTWARE_THERMAL | HARDWARE_THERMAL) else None
    return {HealthCheck.THERMAL_SLOWDOWN: _BRAKE if mask & POWER_BRAKE else hot}


CHECKS: tuple[Callable[[GpuFacts], Results], ...] = (
    state_results,
    memory_results,
    recovery_results,
    thermal_results,
)


def results(facts: GpuFacts) -> Results:
    """What all checks that need no memory say."""
    return {check: finding for one in CHECKS for check, finding in one(facts).items()}
