"""The names under which readings are shown: tables of data, one line each. Pure.

A line says which field of `GpuReading` (or `HostReading`) is shown under which name, and how its unit is changed. A
reading that is absent has no series; it is never shown as 0. `DCGM` has the names, types and units of NVIDIA's
dcgm-exporter (etc/default-counters.csv and dcgm_fields.h there), `DCGM_CHECKED` those that its Grafana board needs and
Prometheus' own checker passes; the other tables have our own names in base units. A reading that DCGM knows and the
driver cannot tell is in neither.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from gpuscale.common.runtime.metrics_text import Family, Kind

Names = Literal["checked", "all", "dcgm", "gpuscale"]
HostLabel = Literal["hostname", "Hostname"]


@dataclass(frozen=True, slots=True)
class Style:
    """How series are named.

    Attributes:
        names: which names the readings of GPUs have: our own and DCGM's as far as `promtool check metrics` has no
            complaint, both to the letter, DCGM's, or our own.
        host_label: how DCGM's host label is written.
        many_nodes: whether the page shows several nodes: series of DCGM then have a label `node` more.
    """

    names: Names = "checked"
    host_label: HostLabel = "hostname"
    many_nodes: bool = False


MIB = 1024**2
PRESSURE = "Share of time in which some task waited for {}."
STALLED = "Share of time in which every task waited for {}."


@dataclass(frozen=True, slots=True)
class Series:
    """One reading under one name."""

    field: str
    family: Family
    convert: Callable[[float], float]


def same(value: float) -> float:
    """The unit of the reading."""
    return value


def ratio(percent: float) -> float:
    """From percent to 0-1."""
    return percent / 100


def hertz(megahertz: float) -> float:
    """From MHz to Hz."""
    return megahertz * 1e6


def mebibytes(amount: float) -> float:
    """From bytes to whole MiB, rounded down as DCGM does."""
    return amount // MIB


def flag(value: float) -> float:
    """1 for true, 0 for false."""
    return int(value)


def millijoules(joules: float) -> float:
    """From J to mJ."""
    return round(joules * 1000)


def _series(field: str, name: str, kind: Kind, text: str, convert: Callable[[float], float] = same) -> Series:
    return Series(field, Family(name, kind, text), convert)


def _dcgm(field: str, name: str, kind: Kind, text: str, convert: Callable[[float], float] = same) -> Series:
    return _series(field, f"DCGM_FI_DEV_{name}", kind, text, convert)


def _gpu(field: str, name: str, kind: Kind, text: str, convert: Callable[[float], float] = same) -> Series:
    return _series(field, f"gpuscale_gpu_{name}", kind, text, convert)


def _host(field: str, name: str, kind: Kind, text: str, convert: Callable[[float], float] = same) -> Series:
    return _series(field, f"gpuscale_host_{name}", kind, text, convert)


DCGM: tuple[Series, ...] = (
    _dcgm("sm_clock_mhz", "SM_CLOCK", "gauge", "Clock of the streaming multiprocessors in MHz."),
    _dcgm("memory_clock_mhz", "MEM_CLOCK", "gauge", "Clock of device memory in MHz."),
    _dcgm("temperature_celsius", "GPU_TEMP", "gauge", "Core temperature in degrees Celsius."),
    _dcgm("power_watts", "POWER_USAGE", "gauge", "Power drawn in W."),
    _dcgm("power_limit_watts", "ENFORCED_POWER_LIMIT", "gauge", "Power limit in force in W."),
    _dcgm("utilization_percent", "GPU_UTIL", "gauge", "Share of time in which a kernel ran, in percent."),
    _dcgm(
        "memory_utilization_percent",
        "MEM_COPY_UTIL",
        "gauge",
        "Share of time in which device memory was read or written, in percent.",
    ),
    _dcgm("memory_total_bytes", "FB_TOTAL", "gauge", "Size of device memory in MiB.", mebibytes),
    _dcgm("memory_free_bytes", "FB_FREE", "gauge", "Device memory that can be had, in MiB.", mebibytes),
    _dcgm("memory_used_bytes", "FB_USED", "gauge", "Device memory held by processes, in MiB.", mebibytes),
    _dcgm(
        "memory_reserved_bytes",
        "FB_RESERVED",
        "gauge",
        "Device memory kept by the driver, in MiB.",
        mebibytes,
    ),
    _dcgm("performance_state", "PSTATE", "gauge", "Performance state, 0 (fastest) to 15."),
    _dcgm("memory_temperature_celsius", "MEMORY_TEMP", "gauge", "Temperature of device memory, Celsius."),
    _dcgm("video_clock_mhz", "VIDEO_CLOCK", "gauge", "Clock of encoder and decoder in MHz."),
    _dcgm("encoder_utilization_percent", "ENC_UTIL", "gauge", "Use of the encoder in percent."),
    _dcgm("decoder_utilization_percent", "DEC_UTIL", "gauge", "Use of the decoder in percent."),
    _dcgm("energy_joules", "TOTAL_ENERGY_CONSUMPTION", "counter", "Energy used in mJ.", millijoules),
    _dcgm("throttle_reason_mask", "CLOCKS_EVENT_REASONS", "gauge", "Why clocks are held down, as bits."),
    _dcgm("power_limit_default_watts", "POWER_MGMT_LIMIT_DEF", "gauge", "Power limit of the factory in W."),
    _dcgm("power_limit_min_watts", "POWER_MGMT_LIMIT_MIN", "gauge", "Lowest power limit to be set, in W."),
    _dcgm("power_limit_max_watts", "POWER_MGMT_LIMIT_MAX", "gauge", "Highest power limit to be set, in W."),
    _dcgm("pcie_link_generation", "PCIE_LINK_GEN", "gauge", "Generation of the PCIe link now."),
    _dcgm("pcie_link_width", "PCIE_LINK_WIDTH", "gauge", "Lanes of the PCIe link now."),
    _dcgm("pcie_replay_count", "PCIE_REPLAY_COUNTER", "counter", "PCIe transfers that had to be repeated."),
    _dcgm(
        "nvlink_replay_error_count",
        "NVLINK_REPLAY_ERROR_COUNT_TOTAL",
        "counter",
        "NVLink transfers that had to be repeated.",
    ),
    _dcgm(
        "nvlink_recovery_error_count",
        "NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
        "counter",
        "Recoveries of NVLinks.",
    ),
    _dcgm("ecc_volatile_corrected_count", "ECC_SBE_VOL_TOTAL", "counter", "Single-bit errors since load."),
    _dcgm("ecc_volatile_uncorrected_count", "ECC_DBE_VOL_TOTAL", "counter", "Double-bit errors since load."),
    _dcgm("ecc_aggregate_corrected_count", "ECC_SBE_AGG_TOTAL", "counter", "Single-bit errors, ever."),
    _dcgm("ecc_aggregate_uncorrected_count", "ECC_DBE_AGG_TOTAL", "counter", "Double-bit errors, ever."),
    _dcgm("retired_pages_corrected_count", "RETIRED_SBE", "counter", "Pages retired for single-bit errors."),
    _dcgm(
        "retired_pages_uncorrected_count", "RETIRED_DBE", "counter", "Pages retired for double-bit errors."
    ),
    _dcgm("retired_pages_pending", "RETIRED_PENDING", "gauge", "1 while pages wait to be retired.", flag),
    _dcgm(
        "remapped_rows_corrected_count",
        "CORRECTABLE_REMAPPED_ROWS",
        "counter",
        "Rows replaced for errors that were corrected.",
    ),
    _dcgm(
        "remapped_rows_uncorrected_count",
        "UNCORRECTABLE_REMAPPED_ROWS",
        "counter",
        "Rows replaced for errors that were not corrected.",
    ),
    _dcgm("remapped_rows_pending", "ROW_REMAP_PENDING", "gauge", "1 while rows wait to be replaced.", flag),
    _dcgm("remapped_rows_failed", "ROW_REMAP_FAILURE", "gauge", "1 once replacing rows has failed.", flag),
)


def _checked(series: Series) -> Series:
    """As promtool passes it: a counter whose name has no `_total`, in lower case, has no type. rate() needs none."""
    if series.family.kind != "counter":
        return series
    return replace(series, family=replace(series.family, kind="untyped"))


# Of any type, a name that ends in one is a complaint: PCIE_REPLAY_COUNTER, which no board of dcgm-exporter asks for.
DCGM_CHECKED = tuple(_checked(one) for one in DCGM if not one.family.name.endswith("_COUNTER"))
"""The names of DCGM that pass `promtool check metrics` (promlint of client_golang), with types that do."""

GPU: tuple[Series, ...] = (
    _gpu("utilization_percent", "utilization_ratio", "gauge", "Share of time in which a kernel ran.", ratio),
    _gpu(
        "memory_utilization_percent",
        "memory_utilization_ratio",
        "gauge",
        "Share of time in which device memory was read or written.",
        ratio,
    ),
    _gpu("memory_total_bytes", "memory_total_bytes", "gauge", "Size of device memory."),
    _gpu("memory_used_bytes", "memory_used_bytes", "gauge", "Device memory held by processes."),
    _gpu("memory_free_bytes", "memory_free_bytes", "gauge", "Device memory that can be had."),
    _gpu("memory_reserved_bytes", "memory_reserved_bytes", "gauge", "Device memory kept by the driver."),
    _gpu("temperature_celsius", "temperature_celsius", "gauge", "Core temperature."),
    _gpu("power_watts", "power_watts", "gauge", "Power drawn."),
    _gpu("power_limit_watts", "power_limit_watts", "gauge", "Power limit in force."),
    _gpu("sm_clock_mhz", "sm_clock_hertz", "gauge", "Clock of the streaming multiprocessors.", hertz),
    _gpu("memory_clock_mhz", "memory_clock_hertz", "gauge", "Clock of device memory.", hertz),
    _gpu("performance_state", "performance_state", "gauge", "Performance state, 0 (fastest) to 15."),
    _gpu("memory_temperature_celsius", "memory_temperature_celsius", "gauge", "Temperature of memory."),
    _gpu("video_clock_mhz", "video_clock_hertz", "gauge", "Clock of encoder and decoder.", hertz),
    _gpu("encoder_utilization_percent", "encoder_utilization_ratio", "gauge", "Use of the encoder.", ratio),
    _gpu("decoder_utilization_percent", "decoder_utilization_ratio", "gauge", "Use of the decoder.", ratio),
    _gpu("energy_joules", "energy_joules_total", "counter", "Energy used since the driver was loaded."),
    _gpu("power_limit_default_watts", "power_limit_default_watts", "gauge", "Power limit of the factory."),
    _gpu("power_limit_min_watts", "power_limit_min_watts", "gauge", "Lowest power limit that can be set."),
    _gpu("power_limit_max_watts", "power_limit_max_watts", "gauge", "Highest power limit that can be set."),
    _gpu("pcie_link_generation", "pcie_link_generation", "gauge", "Generation of the PCIe link now."),
    _gpu("pcie_link_width", "pcie_link_width", "gauge", "Lanes of the PCIe link now."),
    _gpu("pcie_replay_count", "pcie_replays_total", "counter", "PCIe transfers that had to be repeated."),
    _gpu("pcie_sent_bytes", "pcie_sent_bytes_total", "counter", "Bytes that the GPU sent over PCIe."),
    _gpu("pcie_received_bytes", "pcie_received_bytes_total", "counter", "Bytes it received over PCIe."),
    _gpu("nvlink_active_count", "nvlinks_active", "gauge", "NVLinks that are up."),
    _gpu("nvlink_sent_bytes", "nvlink_sent_bytes_total", "counter", "Bytes sent over all NVLinks."),
    _gpu("nvlink_received_bytes", "nvlink_received_bytes_total", "counter", "Bytes received over NVLinks."),
    _gpu("nvlink_crc_error_count", "nvlink_crc_errors_total", "counter", "Checksum errors of all NVLinks."),
    _gpu("nvlink_replay_error_count", "nvlink_replay_errors_total", "counter", "Repeated NVLink transfers."),
    _gpu("nvlink_recovery_error_count", "nvlink_recovery_errors_total", "counter", "Recoveries of NVLinks."),
    _gpu(
        "ecc_volatile_corrected_count",
        "ecc_volatile_corrected_total",
        "counter",
        "Memory errors that were corrected, since the driver was loaded.",
    ),
    _gpu(
        "ecc_volatile_uncorrected_count",
        "ecc_volatile_uncorrected_total",
        "counter",
        "Memory errors that were not corrected, since the driver was loaded.",
    ),
    _gpu(
        "ecc_aggregate_corrected_count",
        "ecc_aggregate_corrected_total",
        "counter",
        "Memory errors that were corrected, in the life of the board.",
    ),
    _gpu(
        "ecc_aggregate_uncorrected_count",
        "ecc_aggregate_uncorrected_total",
        "counter",
        "Memory errors that were not corrected, in the life of the board.",
    ),
    _gpu(
        "retired_pages_corrected_count",
        "retired_pages_corrected_total",
        "counter",
        "Memory pages taken out of use after errors that were corrected.",
    ),
    _gpu(
        "retired_pages_uncorrected_count",
        "retired_pages_uncorrected_total",
        "counter",
        "Memory pages taken out of use after an error that was not corrected.",
    ),
    _gpu(
        "retired_pages_pending", "retired_pages_pending", "gauge", "1 while pages wait to be retired.", flag
    ),
    _gpu(
        "remapped_rows_corrected_count",
        "remapped_rows_corrected_total",
        "counter",
        "Memory rows replaced after errors that were corrected.",
    ),
    _gpu(
        "remapped_rows_uncorrected_count",
        "remapped_rows_uncorrected_total",
        "counter",
        "Memory rows replaced after errors that were not corrected.",
    ),
    _gpu(
        "remapped_rows_pending", "remapped_rows_pending", "gauge", "1 while rows wait to be replaced.", flag
    ),
    _gpu("remapped_rows_failed", "remapped_rows_failed", "gauge", "1 once replacing rows has failed.", flag),
)

HOST: tuple[Series, ...] = (
    _host("cpu_percent", "cpu_utilization_ratio", "gauge", "Mean use of all cores.", ratio),
    _host("cpu_count", "cpus", "gauge", "Cores of the host."),
    _host("load_1m", "load1", "gauge", "Load average of 1 minute."),
    _host("load_5m", "load5", "gauge", "Load average of 5 minutes."),
    _host("load_15m", "load15", "gauge", "Load average of 15 minutes."),
    _host("memory_total_bytes", "memory_total_bytes", "gauge", "Size of main memory."),
    _host(
        "memory_available_bytes",
        "memory_available_bytes",
        "gauge",
        "Main memory that can be had without swapping.",
    ),
    _host("memory_used_bytes", "memory_used_bytes", "gauge", "Main memory in use."),
    _host("swap_total_bytes", "swap_total_bytes", "gauge", "Size of swap."),
    _host("swap_used_bytes", "swap_used_bytes", "gauge", "Swap in use."),
    _host(
        "cpu_smoothed_percent", "cpu_smoothed_ratio", "gauge", "Use of all cores, mean of a window.", ratio
    ),
    _host("load_1m_per_core", "load1_per_core", "gauge", "Load average of 1 minute by cores."),
    _host("disk_read_bytes", "disk_read_bytes_total", "counter", "Bytes read from disks."),
    _host("disk_written_bytes", "disk_written_bytes_total", "counter", "Bytes written to disks."),
    _host("network_received_bytes", "network_received_bytes_total", "counter", "Bytes received."),
    _host("network_sent_bytes", "network_sent_bytes_total", "counter", "Bytes sent."),
    _host("pressure_cpu_some_percent", "pressure_cpu_some_ratio", "gauge", PRESSURE.format("cores"), ratio),
    _host(
        "pressure_memory_some_percent",
        "pressure_memory_some_ratio",
        "gauge",
        PRESSURE.format("memory"),
        ratio,
    ),
    _host(
        "pressure_memory_full_percent", "pressure_memory_full_ratio", "gauge", STALLED.format("memory"), ratio
    ),
    _host("pressure_io_some_percent", "pressure_io_some_ratio", "gauge", PRESSURE.format("disks"), ratio),
    _host("pressure_io_full_percent", "pressure_io_full_ratio", "gauge", STALLED.format("disks"), ratio),
)
