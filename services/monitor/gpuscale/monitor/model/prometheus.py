"""The series of readings, as tables with one line each. Pure.

An absent reading has no series. Own names use base units. `DCGM` has the names, types and units of NVIDIA's dcgm-exporter
(its etc/default-counters.csv and dcgm_fields.h), `DCGM_CHECKED` those that promtool accepts.
"""

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from gpuscale.common.runtime.metrics_text import Family

Names = Literal["checked", "all", "dcgm", "gpuscale"]
HostLabel = Literal["hostname", "Hostname"]


@dataclass(frozen=True, slots=True)
class Style:
    """How series are named; with `many_nodes`, DCGM series have a label `node`.

    `names`: "checked" are own and DCGM series that pass `promtool check metrics`, "all" are all of both.
    """

    names: Names = "checked"
    host_label: HostLabel = "hostname"
    many_nodes: bool = False


def gauge(name: str, text: str) -> Family:
    """A family of gauges."""
    return Family(name, "gauge", text)


def counter(name: str, text: str) -> Family:
    """A family of counters."""
    return Family(name, "counter", text)


@dataclass(frozen=True, slots=True)
class ReadingSeries:
    """A field of `GpuReading`, `HostReading` or `GpuProcess`, the family that shows it, and the conversion of its unit."""

    field: str
    family: Family
    convert: Callable[[float], float]


# Field of `GpuReading`, DCGM's name after `DCGM_FI_` or -, help. The own name is `gpuscale_gpu_` and the field in base units;
# `+` adds `_total`, `=` gives another name, `=-` none.
_GPU = """
utilization_percent                  DEV_GPU_UTIL                    Share of time in which a kernel ran.
memory_utilization_percent           DEV_MEM_COPY_UTIL               Share of time in which device memory was accessed.
memory_total_bytes                   DEV_FB_TOTAL                    Size of device memory.
memory_used_bytes                    DEV_FB_USED                     Device memory held by processes.
memory_free_bytes                    DEV_FB_FREE                     Device memory that can be had.
memory_reserved_bytes                DEV_FB_RESERVED                 Device memory kept by the driver.
temperature_celsius                  DEV_GPU_TEMP                    Core temperature.
power_watts                          DEV_POWER_USAGE                 Power drawn.
power_limit_watts                    DEV_ENFORCED_POWER_LIMIT        Power limit in force.
sm_clock_mhz                         DEV_SM_CLOCK                    Clock of the streaming multiprocessors.
memory_clock_mhz                     DEV_MEM_CLOCK                   Clock of device memory.
performance_state                    DEV_PSTATE                      Performance state, 0 (fastest) to 15.
throttle_reason_mask=-               DEV_CLOCKS_EVENT_REASONS        Why clocks are held down, as bits.
memory_temperature_celsius           DEV_MEMORY_TEMP                 Temperature of memory.
video_clock_mhz                      DEV_VIDEO_CLOCK                 Clock of encoder and decoder.
encoder_utilization_percent          DEV_ENC_UTIL                    Use of the encoder.
decoder_utilization_percent          DEV_DEC_UTIL                    Use of the decoder.
energy_joules+                       DEV_TOTAL_ENERGY_CONSUMPTION    Energy used since the driver was loaded.
power_limit_default_watts            DEV_POWER_MGMT_LIMIT_DEF        Default power limit.
power_limit_min_watts                DEV_POWER_MGMT_LIMIT_MIN        Lowest power limit that can be set.
power_limit_max_watts                DEV_POWER_MGMT_LIMIT_MAX        Highest power limit that can be set.
pcie_link_generation                 DEV_PCIE_LINK_GEN               Generation of the PCIe link now.
pcie_link_width                      DEV_PCIE_LINK_WIDTH             Lanes of the PCIe link now.
pcie_replay_count=pcie_replays_total DEV_PCIE_REPLAY_COUNTER         PCIe transfers that had to be repeated.
pcie_sent_bytes+                     -                               Bytes that the GPU sent over PCIe.
pcie_received_bytes+                 -                               Bytes it received over PCIe.
nvlink_active_count=nvlinks_active   -                               NVLinks that are up.
nvlink_sent_bytes+                   -                               Bytes sent over all NVLinks.
nvlink_received_bytes+               -                               Bytes received over NVLinks.
nvlink_crc_error_count=nvlink_crc_errors_total -                               Checksum errors of all NVLinks.
nvlink_replay_error_count=nvlink_replay_errors_total DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL Repeated NVLink transfers.
nvlink_recovery_error_count=nvlink_recovery_errors_total DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL Recoveries of NVLinks.
ecc_volatile_corrected_count         DEV_ECC_SBE_VOL_TOTAL           Corrected memory errors since load.
ecc_volatile_uncorrected_count       DEV_ECC_DBE_VOL_TOTAL           Uncorrected errors since load.
ecc_aggregate_corrected_count        DEV_ECC_SBE_AGG_TOTAL           Corrected memory errors, ever.
ecc_aggregate_uncorrected_count      DEV_ECC_DBE_AGG_TOTAL           Uncorrected errors, ever.
retired_pages_corrected_count        DEV_RETIRED_SBE                 Pages retired for corrected errors.
retired_pages_uncorrected_count      DEV_RETIRED_DBE                 Pages retired for uncorrected errors.
retired_pages_pending                DEV_RETIRED_PENDING             1 while pages wait to be retired.
remapped_rows_corrected_count        DEV_CORRECTABLE_REMAPPED_ROWS   Rows replaced for corrected errors.
remapped_rows_uncorrected_count      DEV_UNCORRECTABLE_REMAPPED_ROWS Rows replaced for uncorrected errors.
remapped_rows_pending                DEV_ROW_REMAP_PENDING           1 while rows wait to be replaced.
remapped_rows_failed                 DEV_ROW_REMAP_FAILURE           1 once replacing rows has failed.
graphics_activity_percent            PROF_GR_ENGINE_ACTIVE           Share of time in which any engine was active.
sm_activity_percent                  PROF_SM_ACTIVE                  Share of the multiprocessors that were busy.
sm_occupancy_percent                 PROF_SM_OCCUPANCY               Share of the warps that could be resident.
tensor_activity_percent              PROF_PIPE_TENSOR_ACTIVE         Share of time in which tensor cores worked.
memory_bandwidth_percent             PROF_DRAM_ACTIVE                Share of the bandwidth of device memory.
fp64_activity_percent                PROF_PIPE_FP64_ACTIVE           Share of time in which FP64 pipes worked.
fp32_activity_percent                PROF_PIPE_FP32_ACTIVE           Share of time in which FP32 pipes worked.
fp16_activity_percent                PROF_PIPE_FP16_ACTIVE           Share of time in which FP16 pipes worked.
pcie_sent_bytes_per_second           PROF_PCIE_TX_BYTES              Bytes sent over PCIe in a second.
pcie_received_bytes_per_second       PROF_PCIE_RX_BYTES              Bytes received over PCIe in a second.
nvlink_sent_bytes_per_second         PROF_NVLINK_TX_BYTES            Bytes sent over NVLinks in a second.
nvlink_received_bytes_per_second     PROF_NVLINK_RX_BYTES            Bytes received over NVLinks in a second.
nvlink_bytes_per_second              DEV_NVLINK_BANDWIDTH_TOTAL      Bytes over all NVLinks, both ways, in a second.
fan_speed_percent                    DEV_FAN_SPEED                   Speed that the fan is told to run at.
sm_clock_max_mhz                     DEV_MAX_SM_CLOCK                Highest clock of the streaming multiprocessors.
memory_clock_max_mhz                 DEV_MAX_MEM_CLOCK               Highest clock of device memory.
bar1_total_bytes                     DEV_BAR1_TOTAL                  Size of BAR1.
bar1_used_bytes                      DEV_BAR1_USED                   Mapped part of BAR1.
bar1_free_bytes                      DEV_BAR1_FREE                   Part of BAR1 that is not mapped.
compute_mode                         DEV_COMPUTE_MODE                Who may compute: 0 all, 1 one thread, 2 nobody, 3 one process.
persistence_mode                     DEV_PERSISTENCE_MODE            1 where the driver stays loaded.
ecc_mode                             DEV_ECC_CURRENT                 1 where errors of memory are corrected.
ecc_mode_pending                     DEV_ECC_PENDING                 1 where they are after the next reboot.
power_violation_seconds+             DEV_POWER_VIOLATION             Time in which the power limit held clocks down.
thermal_violation_seconds+           DEV_THERMAL_VIOLATION           Time in which heat held clocks down.
sync_boost_violation_seconds+        DEV_SYNC_BOOST_VIOLATION        Time in which sync boost held clocks down.
board_limit_violation_seconds+       DEV_BOARD_LIMIT_VIOLATION       Time in which the board held clocks down.
low_utilization_violation_seconds+   DEV_LOW_UTIL_VIOLATION          Time in which lack of work held clocks down.
reliability_violation_seconds+       DEV_RELIABILITY_VIOLATION       Time in which the voltage held clocks down.
vgpu_licensed                        DEV_VGPU_LICENSE_STATUS         1 while a vGPU has its licence.
"""

# Field of `HostReading` and help, for names after `gpuscale_host_`.
_HOST = """
cpu_percent=cpu_utilization_ratio    Mean use of all cores.
cpu_count=cpus                       Cores of the host.
load_1m=load1                        Load average of 1 minute.
load_5m=load5                        Load average of 5 minutes.
load_15m=load15                      Load average of 15 minutes.
memory_total_bytes                   Size of main memory.
memory_available_bytes               Main memory that can be had without swapping.
memory_used_bytes                    Main memory in use.
swap_total_bytes                     Size of swap.
swap_used_bytes                      Swap in use.
cpu_smoothed_percent                 Mean use of all cores in a window.
load_1m_per_core=load1_per_core      Load average of 1 minute per core.
disk_read_bytes+                     Bytes read from disks.
disk_written_bytes+                  Bytes written to disks.
network_received_bytes+              Bytes received.
network_sent_bytes+                  Bytes sent.
pressure_cpu_some_percent            Time in which some task waited for cores.
pressure_memory_some_percent         Time in which some task waited for memory.
pressure_memory_full_percent         Time in which all tasks waited for memory.
pressure_io_some_percent             Time in which some task waited for disks.
pressure_io_full_percent             Time in which all tasks waited for disks.
"""

# Field of `GpuProcess` and help, for names after `gpuscale_gpu_process_`.
_PROCESS = """
memory_used_bytes                    Memory of a GPU that a process holds.
utilization_percent                  Share of time in which its kernels ran.
memory_utilization_percent           Share of time in which it read or wrote memory.
encoder_utilization_percent          Share of time in which it encoded video.
decoder_utilization_percent          Share of time in which it decoded video.
"""

_BASE_UNITS = {"percent": "ratio", "mhz": "hertz", "count": "total"}
"""Replacements of the last word of a name."""
_OWN_UNITS: dict[str, Callable[[float], float]] = {
    "percent": lambda percent: percent / 100,
    "mhz": lambda megahertz: megahertz * 1e6,
}
"""Conversions to base units, by the last word of a name."""

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


_same = operator.pos  # of a bool it makes a number


def _unit(field: str) -> str:
    return field.rpartition("_")[2]


def _rows(table: str) -> Iterable[tuple[str, str, str]]:
    """Each line of a table as field, own name or -, and the rest."""
    for line in table.strip().splitlines():
        named, rest = line.split(maxsplit=1)
        field, _, own = named.removesuffix("+").partition("=")
        head, joint, unit = field.rpartition("_")
        base = f"{head}{joint}{_BASE_UNITS.get(unit, unit)}"
        yield field, own or base + "_total" * named.endswith("+"), rest


def _own(prefix: str, rows: Iterable[tuple[str, str, str]]) -> Iterable[ReadingSeries]:
    for field, name, text in rows:
        if name != "-":
            family = counter if name.endswith("_total") else gauge
            yield ReadingSeries(field, family(prefix + name, text), _OWN_UNITS.get(_unit(field), _same))


_GPU_ROWS = [(field, own, *rest.split(maxsplit=1)) for field, own, rest in _rows(_GPU)]
GPU = tuple(_own("gpuscale_gpu_", ((field, own, text) for field, own, _, text in _GPU_ROWS)))
HOST = tuple(_own("gpuscale_host_", _rows(_HOST)))
PROCESS = tuple(_own("gpuscale_gpu_process_", _rows(_PROCESS)))


def _dcgm() -> Iterable[ReadingSeries]:
    own = {series.field: series for series in GPU}
    for field, _, name, text in _GPU_ROWS:
        known = own.get(field, ReadingSeries(field, gauge("", text), _same))
        family, unit = replace(known.family, name=f"DCGM_FI_{name}"), _unit(field)
        if name.startswith("PROF_"):  # in the same units as own series
            yield replace(known, family=family)
        elif name != "-":
            if unit in _DCGM_UNIT_NAMES:
                family = replace(family, help=f"{text[:-1]}, in {_DCGM_UNIT_NAMES[unit]}.")
            yield ReadingSeries(field, family, _DCGM_UNITS.get(unit, _same))


DCGM = tuple(_dcgm())


# promtool rejects a counter without the suffix `_total`, so these are untyped, and any name that ends in a type.
DCGM_CHECKED = tuple(
    replace(series, family=replace(series.family, kind="untyped"))
    if series.family.kind == "counter"
    else series
    for series in DCGM
    if not series.family.name.endswith("_COUNTER")
)
"""DCGM series that pass `promtool check metrics`."""
