"""One tick of a GPU: tiers that are due are read, the others keep their last readings.

| tier      | every  | calls                                                                                      |
| --------- | ------ | ------------------------------------------------------------------------------------------ |
| fast      | tick   | utilization, memory, temperature, power, two clocks, throttle reasons                      |
| activity  | 5 s    | a GPM sample, and the means since the last one                                              |
| engines   | 5 s    | encoder, decoder, video clock, performance state, one batch of fields: energy, memory heat |
| processes | 5 s    | the lists of processes                                                                     |
| slow      | 30 s   | limit in force, PCIe link, and one batch of fields: ECC, rows, pages, NVLink, limits       |
| board     | 30 s   | fan, BAR1                                                                                  |
| settings  | 5 min  | highest clocks, compute and persistence mode, vGPU licence                                 |
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from struct import Struct
from typing import Any

import pynvml

from gpuscale.monitor.agent.nvml.calls import Failure, KeptAnswer, Queries
from gpuscale.monitor.agent.nvml.field_values import (
    ECC,
    NVLINK,
    NVLINK_COUNT,
    VIOLATIONS,
    Activity,
    FieldReading,
    Links,
    Values,
    ask,
    find_links,
)
from gpuscale.monitor.agent.processes import ProcessNames
from gpuscale.monitor.model.readings import GpuIdentity, GpuReading, ReadingStatus, RecoveryAction

_RECOVERY = {
    pynvml.NVML_GPU_RECOVERY_ACTION_NONE: RecoveryAction.NONE,
    pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET: RecoveryAction.GPU_RESET,
    pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT: RecoveryAction.NODE_REBOOT,
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_P2P: RecoveryAction.DRAIN_PEERS,
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET: RecoveryAction.DRAIN_AND_RESET,
}


_MILLI = 1000.0
_HIGHEST_CELSIUS = 300.0
_HIGHEST_WATTS = 100_000.0


def _thousandth(value: float) -> float:
    return value / _MILLI


_limit = partial(FieldReading, convert=_thousandth, high=_HIGHEST_WATTS * _MILLI)


METERS = (
    FieldReading("memory_temperature_celsius", (pynvml.NVML_FI_DEV_MEMORY_TEMP,), float, _HIGHEST_CELSIUS),
    FieldReading("energy_joules", (pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION,), _thousandth),
)
"""Fields that change slowly or add up."""

SLOW = (
    _limit("power_limit_default_watts", (pynvml.NVML_FI_DEV_POWER_DEFAULT_LIMIT,)),
    _limit("power_limit_min_watts", (pynvml.NVML_FI_DEV_POWER_MIN_LIMIT,)),
    _limit("power_limit_max_watts", (pynvml.NVML_FI_DEV_POWER_MAX_LIMIT,)),
    FieldReading("pcie_replay_count", (pynvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER,)),
    FieldReading("pcie_sent_bytes", (pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES,)),
    FieldReading("pcie_received_bytes", (pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES,)),
    *ECC,
    *VIOLATIONS,
    FieldReading(
        "recovery_action",
        (pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION,),
        lambda action: _RECOVERY.get(int(action), RecoveryAction.OTHER),
    ),
)
"""Fields that rarely change."""


_NO_LINKS = Failure(ReadingStatus.NOT_SUPPORTED, "the GPU has no NVLink")
_NO_COUNTERS = Failure(ReadingStatus.NOT_SUPPORTED, "the GPU does not count bytes over NVLink")

_Processes = list[pynvml.nvmlFriendlyObject]
_ProcessCall = Callable[[pynvml.c_nvmlDevice_t], _Processes]

ACTIVITY_EVERY_SECONDS = 5.0
ENGINES_EVERY_SECONDS = 5.0
PROCESSES_EVERY_SECONDS = 5.0
SLOW_EVERY_SECONDS = 30.0
SETTINGS_EVERY_SECONDS = 300.0
# At one tick a second, no two tiers are due in the same tick after the first.
_FIRST_ACTIVITY_SECONDS = 1.0
_FIRST_PROCESSES_SECONDS = 2.0
_FIRST_SLOW_SECONDS = 28.0
_FIRST_BOARD_SECONDS = 23.0
_FIRST_SETTINGS_SECONDS = 24.0
FIRST_PARTS_SECONDS = 26.0

_PROCESS_USE = {
    "utilization_percent": "smUtil",
    "memory_utilization_percent": "memUtil",
    "encoder_utilization_percent": "encUtil",
    "decoder_utilization_percent": "decUtil",
}
_NO_SAMPLES = (pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_NOT_FOUND)  # how pynvml reports an empty list
_HIGHEST_PERCENT = 100
_HIGHEST_MHZ = 1_000_000.0
_HIGHEST_LINK = 255.0
_HIGHEST_MASK = 2**63 - 1
_HIGHEST_PERFORMANCE_STATE = 15  # 32 is NVML's "unknown"
_UTILIZATION_FIELDS = ("utilization_percent", "memory_utilization_percent")
_MEMORY_FIELDS = ("memory_total_bytes", "memory_used_bytes", "memory_free_bytes", "memory_reserved_bytes")
_ENGINES = {
    "encoder_utilization_percent": pynvml.nvmlDeviceGetEncoderUtilization,
    "decoder_utilization_percent": pynvml.nvmlDeviceGetDecoderUtilization,
}
"""Calls that return utilization and the length of its window."""
_PCIE_LINK = {
    "pcie_link_generation": pynvml.nvmlDeviceGetCurrPcieLinkGeneration,
    "pcie_link_width": pynvml.nvmlDeviceGetCurrPcieLinkWidth,
}
_BAR1 = {"bar1_total_bytes": "bar1Total", "bar1_used_bytes": "bar1Used", "bar1_free_bytes": "bar1Free"}
_NVLINK_RATE = "nvlink_bytes_per_second"
_MOST_FAN_PERCENT = 1000.0
_HIGHEST_MODE = 3
_VGPU = pynvml.NVML_GRID_LICENSE_FEATURE_CODE_VGPU
_NO_LICENCE = Failure(ReadingStatus.NOT_SUPPORTED, "the GPU needs no vGPU licence")
_UNKNOWN_STATE = Failure(ReadingStatus.NOT_SUPPORTED, "unknown to the driver")

# The members of the records that each tick reads: of ctypes, one alone costs as much as all of them so.
_RATES = Struct("@2I")
_MEMORY_V2 = Struct("@8x4Q")
_Memory = tuple[int | None, int | None, int | None, int | None]
_NO_MEMORY: _Memory = (None, None, None, None)


@dataclass(slots=True)
class NvmlDevice:
    """What is kept of a GPU between ticks. `activity` is None for a divided GPU, whose MIG instances have their own."""

    handle: pynvml.c_nvmlDevice_t
    identity: GpuIdentity
    activity: Activity | None = None
    by_address: Mapping[str, str] = field(default_factory=dict[str, str])  # UUIDs of all GPUs by PCI address
    links: Links = field(default_factory=Links)
    unsupported: dict[str, str] = field(default_factory=dict[str, str])
    kept: dict[str, KeptAnswer[Values]] = field(default_factory=dict[str, KeptAnswer[Values]])  # by tier
    base: KeptAnswer[None] | None = None  # what is absent in all tiers, until the first of them is due
    readings: Values = field(default_factory=lambda: dict[str, Any].fromkeys(GpuReading._fields))
    over_links: tuple[int, float] | None = None  # total bytes over NVLinks, and when they were read
    use_seen: int = 0  # driver time of the newest process sample, in microseconds


class Tick:
    """One reading of one GPU."""

    def __init__(self, device: NvmlDevice, queries: Queries, names: ProcessNames) -> None:
        self._device = device
        self._handle = device.handle
        self._queries = queries
        self._names = names

    def read(self) -> GpuReading:
        """Read all tiers that are due. GpuSourceError if NVML is gone."""
        device, queries, handle = self._device, self._queries, self._handle
        utilization = memory_utilization = None
        found = queries.attempt("utilization", pynvml.nvmlDeviceGetUtilizationRates, handle)
        if (rates := queries.value(_UTILIZATION_FIELDS, found)) is not None:
            busy, busy_memory = _RATES.unpack_from(rates)
            utilization = queries.within(_UTILIZATION_FIELDS[0], busy, high=100.0)
            memory_utilization = queries.within(_UTILIZATION_FIELDS[1], busy_memory, high=100.0)
        memory = self._memory()
        ask_heat, sensor = pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU
        temperature = queries.number("temperature_celsius", ask_heat, handle, sensor, high=_HIGHEST_CELSIUS)
        power = self._watts("power_watts", pynvml.nvmlDeviceGetPowerUsage)
        if device.base is None or not queries.serves(device.base):
            device.base = self._ask_tiers()
        device.readings |= zip(_MEMORY_FIELDS, memory, strict=True)
        device.readings |= {
            "utilization_percent": utilization,
            "memory_utilization_percent": memory_utilization,
            "temperature_celsius": temperature,
            "power_watts": power,
            "sm_clock_mhz": self._clock("sm_clock_mhz", pynvml.NVML_CLOCK_SM),
            "memory_clock_mhz": self._clock("memory_clock_mhz", pynvml.NVML_CLOCK_MEM),
            "throttle_reason_mask": self._throttle_reasons(),
            "absent": queries.absent,
        }
        return GpuReading._make(device.readings.values())

    def _ask_tiers(self) -> KeptAnswer[None]:
        """Read the tiers that are due; what all of them lack, until the next is due."""
        device, queries = self._device, self._queries
        before, until = len(queries.absent), math.inf
        for tier, every, first, ask_tier in self._TIERS:
            kept = device.kept.get(tier)
            if kept is None or kept.until <= queries.soon or kept.absent:
                device.readings |= dict.fromkeys(kept.value or () if kept else ())
                kept = device.kept[tier] = queries.kept(kept, every, partial(ask_tier, self), first=first)
                device.readings |= kept.value or {}
            until = min(until, kept.until)
        return KeptAnswer(None, queries.absent[before:], until)

    def _ask_activity(self) -> Values:
        activity = self._device.activity
        return {} if activity is None else activity.ask(self._queries)

    def _memory(self) -> _Memory:
        """Total, used, free and reserved, preferably from the v2 record, since v1 counts reserved memory as used."""
        found = self._queries.attempt(
            "memory v2", pynvml.nvmlDeviceGetMemoryInfo, self._handle, pynvml.nvmlMemory_v2
        )
        if not isinstance(found, Failure):
            total, reserved, free, used = _MEMORY_V2.unpack_from(found)
            return self._plausible(total, used, free, reserved)
        if found.status is ReadingStatus.NOT_SUPPORTED:
            older = self._queries.attempt("memory v1", partial(pynvml.nvmlDeviceGetMemoryInfo, self._handle))
            if not isinstance(older, Failure):
                self._queries.note(_MEMORY_FIELDS[-1:], found)
                return self._plausible(older.total, older.used, older.free, None)
            found = older
        self._queries.note(_MEMORY_FIELDS, found)
        return _NO_MEMORY

    def _plausible(self, total: int, used: int, free: int, reserved: int | None) -> _Memory:
        """The values, unless one exceeds the total."""
        if total > 0 and max(used, free, reserved or 0) <= total:
            return total, used, free, reserved
        detail = f"the driver said {free} free and {used} used of {total}"
        self._queries.note(_MEMORY_FIELDS, Failure(ReadingStatus.ERROR, detail))
        return _NO_MEMORY

    def _throttle_reasons(self) -> int | None:
        """The mask, by the older call if the driver lacks the newer one."""
        found = self._queries.attempt(
            "event reasons", pynvml.nvmlDeviceGetCurrentClocksEventReasons, self._handle
        )
        if isinstance(found, Failure) and found.status is ReadingStatus.NOT_SUPPORTED:
            found = self._queries.attempt(
                "throttle reasons", pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, self._handle
            )
        mask = self._queries.value(("throttle_reason_mask",), found)
        if mask is None or self._queries.within("throttle_reason_mask", mask, high=_HIGHEST_MASK) is None:
            return None
        return mask

    def _ask_engines(self) -> Values:
        state = self._queries.attempt("performance state", pynvml.nvmlDeviceGetPerformanceState, self._handle)
        if not isinstance(state, Failure) and state > _HIGHEST_PERFORMANCE_STATE:
            state = _UNKNOWN_STATE
        readings: Values = {
            "performance_state": self._queries.value(("performance_state",), state),
            "video_clock_mhz": self._clock("video_clock_mhz", pynvml.NVML_CLOCK_VIDEO),
            **ask(self._queries, self._handle, "meter fields", METERS),
        }
        for name, call in _ENGINES.items():
            found = self._queries.value((name,), self._queries.attempt(name, call, self._handle))
            readings[name] = None if found is None else self._queries.within(name, found[0], high=100.0)
        return {name: value for name, value in readings.items() if value is not None}

    def _ask_slow(self) -> Values:
        device, queries = self._device, self._queries
        if not device.links.known and not device.identity.parent_uuid:
            device.links = find_links(device.handle, device.by_address)
        limit = self._watts("power_limit_watts", pynvml.nvmlDeviceGetEnforcedPowerLimit)
        readings: Values = {"power_limit_watts": limit}
        for name, call in _PCIE_LINK.items():
            found = queries.number(name, call, self._handle, high=_HIGHEST_LINK)
            readings[name] = None if found is None else int(found)
        fields: tuple[FieldReading, ...] = SLOW
        links = range(device.links.count)
        if links:
            states = tuple((pynvml.NVML_FI_DEV_NVLINK_GET_STATE, link) for link in links)
            ups = (pynvml.nvmlDeviceGetNvLinkState(device.handle, link) for link in links)
            fields = (*SLOW, *NVLINK, FieldReading(NVLINK_COUNT, states, or_else=lambda: sum(ups)))
        else:
            queries.note((*(field.name for field in NVLINK), NVLINK_COUNT, _NVLINK_RATE), _NO_LINKS)
        readings |= ask(queries, self._handle, "slow fields", fields)
        if links:
            sent, received = (readings.get(name) for name in ("nvlink_sent_bytes", "nvlink_received_bytes"))
            if sent is None or received is None:
                queries.note((_NVLINK_RATE,), _NO_COUNTERS)
            else:  # bytes per second since the last reading: none at first and after a reset of counters
                now, total = queries.now, sent + received
                before, device.over_links = device.over_links, (total, now)
                if before is not None and now > before[1] and total >= before[0]:
                    readings[_NVLINK_RATE] = float(total - before[0]) / (now - before[1])
        return {name: value for name, value in readings.items() if value is not None}

    def _ask_board(self) -> Values:
        queries = self._queries
        fan = pynvml.nvmlDeviceGetFanSpeed
        speed = queries.number("fan_speed_percent", fan, self._handle, high=_MOST_FAN_PERCENT)
        readings: Values = {} if speed is None else {"fan_speed_percent": speed}
        memory = queries.attempt("BAR1", pynvml.nvmlDeviceGetBAR1MemoryInfo, self._handle)
        if queries.value(_BAR1, memory) is not None:
            readings |= {name: getattr(memory, member) for name, member in _BAR1.items()}
        return readings

    def _ask_settings(self) -> Values:
        queries, handle = self._queries, self._handle
        readings: Values = {}
        most = partial(pynvml.nvmlDeviceGetMaxClockInfo, handle)

        def licensed() -> bool | Failure:
            found = pynvml.nvmlDeviceGetGridLicensableFeatures(handle)
            for feature in found.gridLicensableFeatures[: found.licensableFeaturesCount]:
                if found.isGridLicenseSupported and feature.featureCode == _VGPU:
                    return feature.featureState > 0
            return _NO_LICENCE

        for name, ask_one, high, kind in (
            ("sm_clock_max_mhz", partial(most, pynvml.NVML_CLOCK_SM), _HIGHEST_MHZ, float),
            ("memory_clock_max_mhz", partial(most, pynvml.NVML_CLOCK_MEM), _HIGHEST_MHZ, float),
            ("compute_mode", partial(pynvml.nvmlDeviceGetComputeMode, handle), _HIGHEST_MODE, int),
            ("persistence_mode", partial(pynvml.nvmlDeviceGetPersistenceMode, handle), 1, bool),
            ("vgpu_licensed", licensed, 1, bool),
        ):
            found = queries.number(name, ask_one, high=high)
            if found is not None:
                readings[name] = kind(found)
        return readings

    def _ask_processes(self) -> Values:
        """Compute and graphics processes; only one kind if the GPU does not support the other."""
        kinds = (
            self._listed(
                "compute",
                pynvml.nvmlDeviceGetComputeRunningProcesses_v3,
                pynvml.nvmlDeviceGetComputeRunningProcesses_v2,
            ),
            self._listed(
                "graphics",
                pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3,
                pynvml.nvmlDeviceGetGraphicsRunningProcesses_v2,
            ),
        )
        lists = [found for found in kinds if not isinstance(found, Failure)]
        failures = [found for found in kinds if isinstance(found, Failure)]
        failures.sort(key=lambda failure: failure.status is ReadingStatus.NOT_SUPPORTED)
        if failures and (not lists or failures[0].status is not ReadingStatus.NOT_SUPPORTED):
            self._queries.note(("processes",), failures[0])
            return {}
        found = [(process.pid, process.usedGpuMemory) for found in lists for process in found]
        return {"processes": self._names.merge(found, self._use_by_process() if found else None)}

    def _use_by_process(self) -> dict[int, dict[str, float]]:
        """Mean utilization of processes since the last call, by id and field; empty if unsupported."""

        def ask_use() -> list[pynvml.c_nvmlProcessUtilizationSample_t]:
            try:
                return pynvml.nvmlDeviceGetProcessUtilization(self._handle, self._device.use_seen)
            except pynvml.NVMLError as error:
                if error.value in _NO_SAMPLES:
                    return []
                raise

        found = self._queries.attempt("process utilization", ask_use)
        if isinstance(found, Failure):
            return {}
        by_process: dict[int, dict[str, list[int]]] = {}
        for sample in found:
            self._device.use_seen = max(self._device.use_seen, sample.timeStamp)
            shares = by_process.setdefault(sample.pid, {})
            for name, of_sample in _PROCESS_USE.items():
                if (share := getattr(sample, of_sample)) <= _HIGHEST_PERCENT:
                    shares.setdefault(name, []).append(share)
        return {
            pid: {name: round(sum(those) / len(those), 1) for name, those in shares.items()}
            for pid, shares in by_process.items()
        }

    def _listed(self, kind: str, newer: _ProcessCall, older: _ProcessCall) -> _Processes | Failure:
        """Processes by the v3 call, or by v2 if v3 is missing or its records are corrupt."""

        def believed(call: _ProcessCall) -> _Processes | Failure:
            found = call(self._handle)
            if self._names.believable(process.pid for process in found):
                return found
            return Failure(ReadingStatus.NOT_SUPPORTED, "the driver returns impossible process ids")

        found = self._queries.attempt(f"{kind} v3", lambda: believed(newer))
        if isinstance(found, Failure) and found.status is ReadingStatus.NOT_SUPPORTED:
            return self._queries.attempt(f"{kind} v2", lambda: believed(older))
        return found

    def _watts(self, name: str, call: Callable[[pynvml.c_nvmlDevice_t], int]) -> float | None:
        return self._queries.number(name, call, self._handle, scale=_MILLI, high=_HIGHEST_WATTS)

    def _clock(self, name: str, clock: int) -> float | None:
        ask_clock = pynvml.nvmlDeviceGetClockInfo
        return self._queries.number(name, ask_clock, self._handle, clock, high=_HIGHEST_MHZ)

    _TIERS = (
        ("engines", ENGINES_EVERY_SECONDS, None, _ask_engines),
        ("slow", SLOW_EVERY_SECONDS, _FIRST_SLOW_SECONDS, _ask_slow),
        ("board", SLOW_EVERY_SECONDS, _FIRST_BOARD_SECONDS, _ask_board),
        ("settings", SETTINGS_EVERY_SECONDS, _FIRST_SETTINGS_SECONDS, _ask_settings),
        ("activity", ACTIVITY_EVERY_SECONDS, _FIRST_ACTIVITY_SECONDS, _ask_activity),
        ("processes", PROCESSES_EVERY_SECONDS, _FIRST_PROCESSES_SECONDS, _ask_processes),
    )
