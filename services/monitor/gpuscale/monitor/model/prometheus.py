"""The names under which readings are shown: tables of data, one line each. Pure.

A reading that is absent has no series; it is never shown as 0. Our own names are in base units. `DCGM` has the names,
types and units of NVIDIA's dcgm-exporter (etc/default-counters.csv and dcgm_fields.h there), `DCGM_CHECKED` those that
its Grafana board needs and Prometheus' own checker passes. A reading that DCGM knows and the driver cannot tell is in
neither.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from gpuscale.common.runtime.metrics_text import Family

Names = Literal["checked", "all", "dcgm", "gpuscale"]
HostLabel = Literal["hostname", "Hostname"]


@dataclass(frozen=True, slots=True)
class Style:
    """How series are named; on a page of `many_nodes` series of DCGM have a label `node` more.

    `names`: our own and DCGM's as far as `promtool check metrics` has no complaint, both to the letter, DCGM's, or our own.
    """

    names: Names = "checked"
    host_label: HostLabel = "hostname"
    many_nodes: bool = False


def gauge(name: str, text: str) -> Family:
    """A family of figures that go up and down."""
    return Family(name, "gauge", text)


def counter(name: str, text: str) -> Family:
    """A family of figures that only grow."""
    return Family(name, "counter", text)


@dataclass(frozen=True, slots=True)
class ReadingSeries:
    """One field of `GpuReading` or `HostReading` under one name, and how its unit is changed for that."""

    field: str
    family: Family
    convert: Callable[[float], float]


_GPU = (
    ("utilization_percent", "utilization_ratio", "Share of time in which a kernel ran."),
    (
        "memory_utilization_percent",
        "memory_utilization_ratio",
        "Share of time in which device memory was accessed.",
    ),
    ("memory_total_bytes", "memory_total_bytes", "Size of device memory."),
    ("memory_used_bytes", "memory_used_bytes", "Device memory held by processes."),
    ("memory_free_bytes", "memory_free_bytes", "Device memory that can be had."),
    ("memory_reserved_bytes", "memory_reserved_bytes", "Device memory kept by the driver."),
    ("temperature_celsius", "temperature_celsius", "Core temperature."),
    ("power_watts", "power_watts", "Power drawn."),
    ("power_limit_watts", "power_limit_watts", "Power limit in force."),
    ("sm_clock_mhz", "sm_clock_hertz", "Clock of the streaming multiprocessors."),
    ("memory_clock_mhz", "memory_clock_hertz", "Clock of device memory."),
    ("performance_state", "performance_state", "Performance state, 0 (fastest) to 15."),
    ("memory_temperature_celsius", "memory_temperature_celsius", "Temperature of memory."),
    ("video_clock_mhz", "video_clock_hertz", "Clock of encoder and decoder."),
    ("encoder_utilization_percent", "encoder_utilization_ratio", "Use of the encoder."),
    ("decoder_utilization_percent", "decoder_utilization_ratio", "Use of the decoder."),
    ("energy_joules", "energy_joules_total", "Energy used since the driver was loaded."),
    ("power_limit_default_watts", "power_limit_default_watts", "Power limit of the factory."),
    ("power_limit_min_watts", "power_limit_min_watts", "Lowest power limit that can be set."),
    ("power_limit_max_watts", "power_limit_max_watts", "Highest power limit that can be set."),
    ("pcie_link_generation", "pcie_link_generation", "Generation of the PCIe link now."),
    ("pcie_link_width", "pcie_link_width", "Lanes of the PCIe link now."),
    ("pcie_replay_count", "pcie_replays_total", "PCIe transfers that had to be repeated."),
    ("pcie_sent_bytes", "pcie_sent_bytes_total", "Bytes that the GPU sent over PCIe."),
    ("pcie_received_bytes", "pcie_received_bytes_total", "Bytes it received over PCIe."),
    ("nvlink_active_count", "nvlinks_active", "NVLinks that are up."),
    ("nvlink_sent_bytes", "nvlink_sent_bytes_total", "Bytes sent over all NVLinks."),
    ("nvlink_received_bytes", "nvlink_received_bytes_total", "Bytes received over NVLinks."),
    ("nvlink_crc_error_count", "nvlink_crc_errors_total", "Checksum errors of all NVLinks."),
    ("nvlink_replay_error_count", "nvlink_replay_errors_total", "Repeated NVLink transfers."),
    ("nvlink_recovery_error_count", "nvlink_recovery_errors_total", "Recoveries of NVLinks."),
    ("ecc_volatile_corrected_count", "ecc_volatile_corrected_total", "Corrected memory errors since load."),
    ("ecc_volatile_uncorrected_count", "ecc_volatile_uncorrected_total", "Uncorrected errors since load."),
    ("ecc_aggregate_corrected_count", "ecc_aggregate_corrected_total", "Corrected memory errors, ever."),
    ("ecc_aggregate_uncorrected_count", "ecc_aggregate_uncorrected_total", "Uncorrected errors, ever."),
    ("retired_pages_corrected_count", "retired_pages_corrected_total", "Pages retired for corrected errors."),
    (
        "retired_pages_uncorrected_count",
        "retired_pages_uncorrected_total",
        "Pages retired for uncorrected errors.",
    ),
    ("retired_pages_pending", "retired_pages_pending", "1 while pages wait to be retired."),
    ("remapped_rows_corrected_count", "remapped_rows_corrected_total", "Rows replaced for corrected errors."),
    (
        "remapped_rows_uncorrected_count",
        "remapped_rows_uncorrected_total",
        "Rows replaced for uncorrected errors.",
    ),
    ("remapped_rows_pending", "remapped_rows_pending", "1 while rows wait to be replaced."),
    ("remapped_rows_failed", "remapped_rows_failed", "1 once replacing rows has failed."),
    ("graphics_activity_percent", "graphics_activity_ratio", "Share of time in which any engine was active."),
    ("sm_activity_percent", "sm_activity_ratio", "Share of the multiprocessors that were busy."),
    ("sm_occupancy_percent", "sm_occupancy_ratio", "Share of the warps that could be resident."),
    ("tensor_activity_percent", "tensor_activity_ratio", "Share of time in which tensor cores worked."),
    ("memory_bandwidth_percent", "memory_bandwidth_ratio", "Share of the bandwidth of device memory."),
    ("fp64_activity_percent", "fp64_activity_ratio", "Share of time in which FP64 pipes worked."),
    ("fp32_activity_percent", "fp32_activity_ratio", "Share of time in which FP32 pipes worked."),
    ("fp16_activity_percent", "fp16_activity_ratio", "Share of time in which FP16 pipes worked."),
    ("pcie_sent_bytes_per_second", "pcie_sent_bytes_per_second", "Bytes sent over PCIe in a second."),
    (
        "pcie_received_bytes_per_second",
        "pcie_received_bytes_per_second",
        "Bytes received over PCIe in a second.",
    ),
    ("nvlink_sent_bytes_per_second", "nvlink_sent_bytes_per_second", "Bytes sent over NVLinks in a second."),
    (
        "nvlink_received_bytes_per_second",
        "nvlink_received_bytes_per_second",
        "Bytes received over NVLinks in a second.",
    ),
    ("nvlink_bytes_per_second", "nvlink_bytes_per_second", "Bytes over all NVLinks, both ways, in a second."),
    ("fan_speed_percent", "fan_speed_ratio", "Speed that the fan is told to run at."),
    ("sm_clock_max_mhz", "sm_clock_max_hertz", "Highest clock of the streaming multiprocessors."),
    ("memory_clock_max_mhz", "memory_clock_max_hertz", "Highest clock of device memory."),
    ("bar1_total_bytes", "bar1_total_bytes", "Size of BAR1."),
    ("bar1_used_bytes", "bar1_used_bytes", "Mapped part of BAR1."),
    ("bar1_free_bytes", "bar1_free_bytes", "Part of BAR1 that is not mapped."),
    ("compute_mode", "compute_mode", "Who may compute: 0 all, 1 one thread, 2 nobody, 3 one process."),
    ("persistence_mode", "persistence_mode", "1 where the driver stays loaded."),
    ("ecc_mode", "ecc_mode", "1 where errors of memory are corrected."),
    ("ecc_mode_pending", "ecc_mode_pending", "1 where they are from the next reboot on."),
    *(
        (
            f"{why}_violation_seconds",
            f"{why}_violation_seconds_total",
            f"Time in which {what} held clocks down.",
        )
        for why, what in (
            ("power", "the power limit"),
            ("thermal", "heat"),
            ("sync_boost", "sync boost"),
            ("board_limit", "the board"),
            ("low_utilization", "lack of work"),
            ("reliability", "the voltage"),
        )
    ),
    ("vgpu_licensed", "vgpu_licensed", "1 while a vGPU has its licence."),
)
"""The field of `GpuReading`, its name after `gpuscale_gpu_`, and what it is. What adds up ends in `_total`."""

_HOST = (
    ("cpu_percent", "cpu_utilization_ratio", "Mean use of all cores."),
    ("cpu_count", "cpus", "Cores of the host."),
    ("load_1m", "load1", "Load average of 1 minute."),
    ("load_5m", "load5", "Load average of 5 minutes."),
    ("load_15m", "load15", "Load average of 15 minutes."),
    ("memory_total_bytes", "memory_total_bytes", "Size of main memory."),
    ("memory_available_bytes", "memory_available_bytes", "Main memory that can be had without swapping."),
    ("memory_used_bytes", "memory_used_bytes", "Main memory in use."),
    ("swap_total_bytes", "swap_total_bytes", "Size of swap."),
    ("swap_used_bytes", "swap_used_bytes", "Swap in use."),
    ("cpu_smoothed_percent", "cpu_smoothed_ratio", "Use of all cores, mean of a window."),
    ("load_1m_per_core", "load1_per_core", "Load average of 1 minute by cores."),
    ("disk_read_bytes", "disk_read_bytes_total", "Bytes read from disks."),
    ("disk_written_bytes", "disk_written_bytes_total", "Bytes written to disks."),
    ("network_received_bytes", "network_received_bytes_total", "Bytes received."),
    ("network_sent_bytes", "network_sent_bytes_total", "Bytes sent."),
    ("pressure_cpu_some_percent", "pressure_cpu_some_ratio", "Time in which some task waited for cores."),
    (
        "pressure_memory_some_percent",
        "pressure_memory_some_ratio",
        "Time in which some task waited for memory.",
    ),
    (
        "pressure_memory_full_percent",
        "pressure_memory_full_ratio",
        "Time in which all tasks waited for memory.",
    ),
    ("pressure_io_some_percent", "pressure_io_some_ratio", "Time in which some task waited for disks."),
    ("pressure_io_full_percent", "pressure_io_full_ratio", "Time in which all tasks waited for disks."),
)
"""The same of `HostReading`, after `gpuscale_host_`."""

_DCGM = {
    "sm_clock_mhz": "SM_CLOCK",
    "memory_clock_mhz": "MEM_CLOCK",
    "temperature_celsius": "GPU_TEMP",
    "power_watts": "POWER_USAGE",
    "power_limit_watts": "ENFORCED_POWER_LIMIT",
    "utilization_percent": "GPU_UTIL",
    "memory_utilization_percent": "MEM_COPY_UTIL",
    "memory_total_bytes": "FB_TOTAL",
    "memory_free_bytes": "FB_FREE",
    "memory_used_bytes": "FB_USED",
    "memory_reserved_bytes": "FB_RESERVED",
    "performance_state": "PSTATE",
    "memory_temperature_celsius": "MEMORY_TEMP",
    "video_clock_mhz": "VIDEO_CLOCK",
    "encoder_utilization_percent": "ENC_UTIL",
    "decoder_utilization_percent": "DEC_UTIL",
    "energy_joules": "TOTAL_ENERGY_CONSUMPTION",
    "throttle_reason_mask": "CLOCKS_EVENT_REASONS",
    "power_limit_default_watts": "POWER_MGMT_LIMIT_DEF",
    "power_limit_min_watts": "POWER_MGMT_LIMIT_MIN",
    "power_limit_max_watts": "POWER_MGMT_LIMIT_MAX",
    "pcie_link_generation": "PCIE_LINK_GEN",
    "pcie_link_width": "PCIE_LINK_WIDTH",
    "pcie_replay_count": "PCIE_REPLAY_COUNTER",
    "nvlink_replay_error_count": "NVLINK_REPLAY_ERROR_COUNT_TOTAL",
    "nvlink_recovery_error_count": "NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
    "ecc_volatile_corrected_count": "ECC_SBE_VOL_TOTAL",
    "ecc_volatile_uncorrected_count": "ECC_DBE_VOL_TOTAL",
    "ecc_aggregate_corrected_count": "ECC_SBE_AGG_TOTAL",
    "ecc_aggregate_uncorrected_count": "ECC_DBE_AGG_TOTAL",
    "retired_pages_corrected_count": "RETIRED_SBE",
    "retired_pages_uncorrected_count": "RETIRED_DBE",
    "retired_pages_pending": "RETIRED_PENDING",
    "remapped_rows_corrected_count": "CORRECTABLE_REMAPPED_ROWS",
    "remapped_rows_uncorrected_count": "UNCORRECTABLE_REMAPPED_ROWS",
    "remapped_rows_pending": "ROW_REMAP_PENDING",
    "remapped_rows_failed": "ROW_REMAP_FAILURE",
    "nvlink_bytes_per_second": "NVLINK_BANDWIDTH_TOTAL",
    "fan_speed_percent": "FAN_SPEED",
    "sm_clock_max_mhz": "MAX_SM_CLOCK",
    "memory_clock_max_mhz": "MAX_MEM_CLOCK",
    "bar1_total_bytes": "BAR1_TOTAL",
    "bar1_used_bytes": "BAR1_USED",
    "bar1_free_bytes": "BAR1_FREE",
    "compute_mode": "COMPUTE_MODE",
    "persistence_mode": "PERSISTENCE_MODE",
    "ecc_mode": "ECC_CURRENT",
    "ecc_mode_pending": "ECC_PENDING",
    "power_violation_seconds": "POWER_VIOLATION",
    "thermal_violation_seconds": "THERMAL_VIOLATION",
    "sync_boost_violation_seconds": "SYNC_BOOST_VIOLATION",
    "board_limit_violation_seconds": "BOARD_LIMIT_VIOLATION",
    "low_utilization_violation_seconds": "LOW_UTIL_VIOLATION",
    "reliability_violation_seconds": "RELIABILITY_VIOLATION",
    "vgpu_licensed": "VGPU_LICENSE_STATUS",
}
"""Names of DCGM, after `DCGM_FI_DEV_`."""

_PROF = {
    "graphics_activity_percent": "GR_ENGINE_ACTIVE",
    "sm_activity_percent": "SM_ACTIVE",
    "sm_occupancy_percent": "SM_OCCUPANCY",
    "tensor_activity_percent": "PIPE_TENSOR_ACTIVE",
    "memory_bandwidth_percent": "DRAM_ACTIVE",
    "fp64_activity_percent": "PIPE_FP64_ACTIVE",
    "fp32_activity_percent": "PIPE_FP32_ACTIVE",
    "fp16_activity_percent": "PIPE_FP16_ACTIVE",
    "pcie_sent_bytes_per_second": "PCIE_TX_BYTES",
    "pcie_received_bytes_per_second": "PCIE_RX_BYTES",
    "nvlink_sent_bytes_per_second": "NVLINK_TX_BYTES",
    "nvlink_received_bytes_per_second": "NVLINK_RX_BYTES",
}
"""Names of DCGM, after `DCGM_FI_PROF_`, in the units of our own."""

_OWN_UNITS: dict[str, Callable[[float], float]] = {
    "percent": lambda percent: percent / 100,
    "mhz": lambda megahertz: megahertz * 1e6,
}
"""From the unit of a reading, which is the last word of its name, to base units; others stay."""

_DCGM_UNITS: dict[str, Callable[[float], float]] = {
    "bytes": lambda amount: amount // 1024**2,  # whole MiB, rounded down
    "joules": lambda joules: round(joules * 1000),
    "seconds": lambda seconds: round(seconds * 1e9),
    "second": lambda rate: rate // (1024 * 1000),  # what DCGM makes of KiB
}
_DCGM_UNIT_NAMES = {
    "bytes": "MiB",
    "joules": "mJ",
    "mhz": "MHz",
    "percent": "percent",
    "seconds": "ns",
    "second": "MB/s",
}


def _same(value: float) -> float:
    return int(value) if isinstance(value, bool) else value


def _unit(field: str) -> str:
    return field.rpartition("_")[2]


def _own(prefix: str, rows: Iterable[tuple[str, str, str]]) -> Iterable[ReadingSeries]:
    for field, name, text in rows:
        family = counter if name.endswith("_total") else gauge
        yield ReadingSeries(field, family(prefix + name, text), _OWN_UNITS.get(_unit(field), _same))


GPU = tuple(_own("gpuscale_gpu_", _GPU))
HOST = tuple(_own("gpuscale_host_", _HOST))


def _dcgm() -> Iterable[ReadingSeries]:
    own = {series.field: series.family for series in GPU}
    for series in GPU:
        if series.field in _PROF:
            family = replace(series.family, name=f"DCGM_FI_PROF_{_PROF[series.field]}")
            yield replace(series, family=family)
    bits = gauge("", "Why clocks are held down, as bits.")
    for field, name in _DCGM.items():
        family, unit = own.get(field, bits), _unit(field)
        text = (
            f"{family.help[:-1]}, in {_DCGM_UNIT_NAMES[unit]}." if unit in _DCGM_UNIT_NAMES else family.help
        )
        yield ReadingSeries(
            field, replace(family, name=f"DCGM_FI_DEV_{name}", help=text), _DCGM_UNITS.get(unit, _same)
        )


DCGM = tuple(_dcgm())


# A counter whose name has no `_total`, in lower case, must have no type; rate() needs none. And of any type, a name that
# ends in one is a complaint: PCIE_REPLAY_COUNTER, which no board of dcgm-exporter asks for.
DCGM_CHECKED = tuple(
    replace(series, family=replace(series.family, kind="untyped"))
    if series.family.kind == "counter"
    else series
    for series in DCGM
    if not series.family.name.endswith("_COUNTER")
)
"""The names of DCGM that pass `promtool check metrics` (promlint of client_golang), with types that do."""
