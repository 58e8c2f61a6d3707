"""From the messages of the contract to what the checks look at."""

from gpuscale.api.types import v1 as types_api
from gpuscale.monitor.health.checks import HARDWARE_THERMAL, POWER_BRAKE, SOFTWARE_THERMAL
from gpuscale.monitor.model.health import GpuFacts

_STATES = {value: name.removeprefix("GPU_STATE_") for name, value in types_api.GpuState.items()}
_ACTIONS = {value: name.removeprefix("RECOVERY_ACTION_") for name, value in types_api.RecoveryAction.items()}


def facts_of(gpu: types_api.Gpu) -> GpuFacts:
    """What the checks look at of a GPU."""
    reading = gpu.reading
    has = reading.HasField
    return GpuFacts(
        state=_STATES.get(gpu.state, ""),
        ecc_uncorrected=reading.ecc_volatile_uncorrected_count
        if has("ecc_volatile_uncorrected_count")
        else None,
        remap_failed=reading.remapped_rows_failed if has("remapped_rows_failed") else None,
        remap_pending=reading.remapped_rows_pending if has("remapped_rows_pending") else None,
        retired_pending=reading.retired_pages_pending if has("retired_pages_pending") else None,
        recovery_action=_ACTIONS.get(reading.recovery_action, "OTHER") if has("recovery_action") else None,
        throttle_reason_mask=reading.throttle_reason_mask if has("throttle_reason_mask") else None,
        pcie_replays=reading.pcie_replay_count if has("pcie_replay_count") else None,
        nvlinks_active=reading.nvlink_active_count if has("nvlink_active_count") else None,
    )


_FINE = frozenset(
    types_api.GpuState.Value(f"GPU_STATE_{word}") for word in ("OK", "DEGRADED", "SLOW", "DIVIDED", "STALE")
)
_SLOWDOWN = SOFTWARE_THERMAL | HARDWARE_THERMAL | POWER_BRAKE
_NO_ACTION = types_api.RecoveryAction.RECOVERY_ACTION_NONE

WATCHED_FIELDS = frozenset(
    types_api.GpuReading.DESCRIPTOR.fields_by_name[name].number
    for name in (
        "ecc_volatile_uncorrected_count",
        "throttle_reason_mask",
        "remapped_rows_failed",
        "remapped_rows_pending",
        "retired_pages_pending",
        "recovery_action",
    )
)
"""The readings that decide whether a GPU looks well, by number: a change of others need not be looked at."""


def looks_well(gpu: types_api.Gpu) -> bool:
    """Whether no check that needs no memory can find anything: quick, since thousands are looked at each second.

    An absent reading is 0 to protobuf, which here says no more than that nothing is found.
    """
    reading = gpu.reading
    return gpu.state in _FINE and not (
        reading.ecc_volatile_uncorrected_count
        or reading.throttle_reason_mask & _SLOWDOWN
        or reading.remapped_rows_failed
        or reading.remapped_rows_pending
        or reading.retired_pages_pending
        or reading.recovery_action > _NO_ACTION
    )
