"""The agent's readings, as immutable values.

An absent reading is None, never zero, and is listed in `absent` with its reason. Names end in the unit; percent are 0-100. Times
are seconds of the agent's clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum, auto
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

from gpuscale.common.topology import NOWHERE, PciPlace

T = TypeVar("T")


class ReadingStatus(Enum):
    """Why a reading is absent."""

    NOT_SUPPORTED = auto()
    NO_PERMISSION = auto()
    TIMEOUT = auto()
    LOST = auto()
    ERROR = auto()
    STALE = auto()


EXCUSED = frozenset({ReadingStatus.NOT_SUPPORTED, ReadingStatus.NO_PERMISSION})
"""Reasons that are no fault of the GPU."""


class GpuState(Enum):
    """Whether a GPU answers."""

    OK = auto()
    DEGRADED = auto()
    SLOW = auto()
    HUNG = auto()
    LOST = auto()
    RESET_REQUIRED = auto()
    RELEASED = auto()
    DIVIDED = auto()


class RecoveryAction(Enum):
    """The action that the driver asks for to recover a GPU."""

    NONE = auto()
    GPU_RESET = auto()
    NODE_REBOOT = auto()
    DRAIN_PEERS = auto()
    DRAIN_AND_RESET = auto()
    OTHER = auto()


class Absent(NamedTuple):
    """An absent reading: field name, reason, and the error of driver or system."""

    field: str
    status: ReadingStatus
    detail: str = ""


class ProcessKey(NamedTuple):
    """A process of this boot, by pid and start, since pids are reused."""

    pid: int
    started: int  # clock ticks since boot


class GpuProcess(NamedTuple):
    """A process that holds memory of a GPU; None or empty if unknown."""

    pid: int
    memory_used_bytes: int | None = None
    command: str | None = None
    reservation: str | None = None  # `reservations/{reservation}`
    lineage: tuple[ProcessKey, ...] = ()  # the process and its ancestors, nearest first
    holder_unknown: bool = False  # whether its reservation cannot be determined
    container: str = ""  # the cgroup path of its container or pod
    pod: str = ""  # the UID of its pod, or namespace/name once known
    mark: str = ""  # the reservation named in its environment, which anybody can set
    user: int | None = None  # Unix user id
    user_name: str = ""  # its name, or the id as text
    program: str = ""  # without arguments that may be secrets
    utilization_percent: float | None = None
    memory_utilization_percent: float | None = None
    encoder_utilization_percent: float | None = None
    decoder_utilization_percent: float | None = None


class GpuReading(NamedTuple):
    """The readings of a GPU. `memory_free_bytes` is the driver's, never total minus used.

    A tuple, since `_replace`, used for every GPU in every tick, takes a fifth of the time of a frozen dataclass.
    """

    utilization_percent: float | None = None
    memory_utilization_percent: float | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_free_bytes: int | None = None
    memory_reserved_bytes: int | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    performance_state: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    encoder_utilization_percent: float | None = None
    decoder_utilization_percent: float | None = None
    memory_temperature_celsius: float | None = None
    energy_joules: float | None = None
    video_clock_mhz: float | None = None
    throttle_reason_mask: int | None = None
    power_limit_default_watts: float | None = None
    power_limit_min_watts: float | None = None
    power_limit_max_watts: float | None = None
    pcie_link_generation: int | None = None
    pcie_link_width: int | None = None
    pcie_replay_count: int | None = None
    pcie_sent_bytes: int | None = None
    pcie_received_bytes: int | None = None
    nvlink_active_count: int | None = None
    nvlink_sent_bytes: int | None = None
    nvlink_received_bytes: int | None = None
    nvlink_crc_error_count: int | None = None
    nvlink_replay_error_count: int | None = None
    nvlink_recovery_error_count: int | None = None
    ecc_volatile_corrected_count: int | None = None
    ecc_volatile_uncorrected_count: int | None = None
    ecc_aggregate_corrected_count: int | None = None
    ecc_aggregate_uncorrected_count: int | None = None
    retired_pages_corrected_count: int | None = None
    retired_pages_uncorrected_count: int | None = None
    retired_pages_pending: bool | None = None
    remapped_rows_corrected_count: int | None = None
    remapped_rows_uncorrected_count: int | None = None
    remapped_rows_pending: bool | None = None
    remapped_rows_failed: bool | None = None
    recovery_action: RecoveryAction | None = None
    graphics_activity_percent: float | None = None
    sm_activity_percent: float | None = None
    sm_occupancy_percent: float | None = None
    tensor_activity_percent: float | None = None
    memory_bandwidth_percent: float | None = None
    fp64_activity_percent: float | None = None
    fp32_activity_percent: float | None = None
    fp16_activity_percent: float | None = None
    pcie_sent_bytes_per_second: float | None = None
    pcie_received_bytes_per_second: float | None = None
    nvlink_sent_bytes_per_second: float | None = None
    nvlink_received_bytes_per_second: float | None = None
    nvlink_bytes_per_second: float | None = None
    fan_speed_percent: float | None = None
    sm_clock_max_mhz: float | None = None
    memory_clock_max_mhz: float | None = None
    bar1_total_bytes: int | None = None
    bar1_used_bytes: int | None = None
    bar1_free_bytes: int | None = None
    compute_mode: int | None = None
    persistence_mode: bool | None = None
    ecc_mode: bool | None = None
    ecc_mode_pending: bool | None = None
    power_violation_seconds: float | None = None
    thermal_violation_seconds: float | None = None
    sync_boost_violation_seconds: float | None = None
    board_limit_violation_seconds: float | None = None
    low_utilization_violation_seconds: float | None = None
    reliability_violation_seconds: float | None = None
    vgpu_licensed: bool | None = None
    absent: tuple[Absent, ...] = ()

    @classmethod
    def nothing(cls, status: ReadingStatus, detail: str) -> "GpuReading":
        """A reading with every field absent for one reason."""
        return cls(absent=tuple(Absent(name, status, detail) for name in GPU_FIELDS))


GPU_FIELDS: tuple[str, ...] = tuple(name for name in GpuReading._fields if name != "absent")
"""The names of a GPU's readings, which are those of the contract's GpuReading."""

_THROTTLE_REASONS = (
    "gpu_idle",
    "application_clocks",
    "sw_power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake",
    "display_clock",
    "board_limit",
    "reliability",
)


@lru_cache(maxsize=256)
def throttle_reasons(mask: int) -> tuple[str, ...]:
    """The names of the reasons in a mask, in the order of bits (nvmlClocksEventReasons in nvml.h)."""
    known = len(_THROTTLE_REASONS)
    bits = (bit for bit in range(mask.bit_length()) if mask >> bit & 1)
    return tuple(_THROTTLE_REASONS[bit] if bit < known else f"bit_{bit}" for bit in bits)


@dataclass(frozen=True, slots=True)
class GpuIdentity:
    """The identity of a GPU, by its UUID. The index is the driver's order, for display only."""

    uuid: str
    index: int
    model: str
    pci_bus_id: str = ""
    simulated: bool = False
    mig_profile: str = ""  # of a MIG instance, such as "1g.10gb", which has the index and address of its GPU
    parent_uuid: str = ""  # the GPU of a MIG instance
    divided: bool = False  # whether it is divided into MIG instances
    place: PciPlace = NOWHERE
    nvlinks: tuple[tuple[str, int], ...] = ()  # UUIDs of peers on this host and numbers of NVLinks to them
    gpu_instance_id: int | None = None  # the driver's id of a MIG instance
    serial: str = ""  # of the board; empty if unknown
    vbios_version: str = ""  # empty if unknown


@dataclass(frozen=True, slots=True)
class MissingGpu:
    """A GPU that the driver cannot identify or does not list."""

    index: int  # in the driver's order, or after it
    pci_bus_id: str  # empty if unknown
    problem: str  # what the driver said


class GpuSample(NamedTuple):
    """The result of one tick of a GPU."""

    state: GpuState
    reading: GpuReading
    link_ends: tuple[str | None, ...] = ()  # UUIDs at the other ends of its NVLinks; None is a switch
    calls: int = 0  # driver calls
    refusals: int = 0  # driver calls that failed, also because the GPU does not support them


class Timed(NamedTuple, Generic[T]):
    """The result of a call, when it was ordered and when it returned."""

    value: T
    ordered_at: float
    read_at: float


@dataclass(frozen=True, slots=True)
class DriverEvent:
    """An XID error of a GPU source; fields are those of `GpuEvent`."""

    uuid: str
    xid: int


@dataclass(frozen=True, slots=True)
class GpuEvent:
    """An XID error, by NVIDIA's number, with the time when the agent received it, as NVML's events have none."""

    uuid: str
    xid: int
    seen_at: float
    seen_time: datetime


class Quarantine(NamedTuple):
    """Why a GPU is quarantined, and since when."""

    reason: str
    since: datetime


class GpuView(NamedTuple):
    """A GPU as a snapshot shows it; `read_at` is None if it was never read."""

    identity: GpuIdentity
    state: GpuState
    reading: GpuReading
    read_at: float | None
    quarantine: Quarantine | None = None
    pods: tuple[str, ...] = ()  # namespace/name of the pods that have it


class NetworkAdapter(NamedTuple):
    """A network card or InfiniBand device on PCIe."""

    name: str
    place: PciPlace


@dataclass(frozen=True, slots=True)
class HostIdentity:
    """The identity of a host, which does not change while the agent runs."""

    hostname: str
    operating_system: str
    boot_id: str
    process_ids_foreign: bool = False  # whether the driver's process ids differ from the agent's
    network_namespace: int = 0  # inode of the agent's network namespace; 0 if unknown
    adapters: tuple[NetworkAdapter, ...] = ()


class HostReading(NamedTuple):
    """The readings of a host."""

    cpu_percent: float | None = None
    load_1m: float | None = None
    load_5m: float | None = None
    load_15m: float | None = None
    cpu_count: int | None = None
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    memory_used_bytes: int | None = None
    swap_total_bytes: int | None = None
    swap_used_bytes: int | None = None
    cpu_smoothed_percent: float | None = None
    load_1m_per_core: float | None = None
    disk_read_bytes: int | None = None
    disk_written_bytes: int | None = None
    network_received_bytes: int | None = None
    network_sent_bytes: int | None = None
    pressure_cpu_some_percent: float | None = None
    pressure_memory_some_percent: float | None = None
    pressure_memory_full_percent: float | None = None
    pressure_io_some_percent: float | None = None
    pressure_io_full_percent: float | None = None
    absent: tuple[Absent, ...] = ()

    @classmethod
    def nothing(cls, status: ReadingStatus, detail: str) -> "HostReading":
        """A reading with every field absent for one reason."""
        return cls(absent=tuple(Absent(name, status, detail) for name in HOST_FIELDS))


HOST_FIELDS: tuple[str, ...] = tuple(name for name in HostReading._fields if name != "absent")
"""The names of a host's readings."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """The GPUs that a source found on `open`.

    `problem`: what is wrong although the source is open, such as a GPU in `missing`. `has_events`: whether it has driver events.
    """

    gpus: Sequence[GpuIdentity]
    driver_version: str = ""
    cuda_version: str = ""  # such as "12.4"
    problem: str = ""
    has_events: bool = False
    missing: tuple[MissingGpu, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The host and all GPUs of a node as known at `taken_at`."""

    node: str
    epoch: str
    seq: int
    taken_at: float
    sample_time: datetime
    period: float
    host: HostIdentity
    host_reading: HostReading
    host_read_at: float | None
    driver_version: str = ""
    cuda_version: str = ""
    gpus: tuple[GpuView, ...] = field(default=())
    gpu_problem: str = ""
    simulated: bool = False
    labels: tuple[tuple[str, str], ...] = ()
