"""What the agent reads, as immutable values.

A reading that was not obtained is None and stands in `absent` with the reason; it is never zero. Units are in the
names: bytes, watts, degrees Celsius, megahertz, and percent of 0-100. Times are seconds of the agent's clock.
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
"""Reasons that say nothing against the GPU."""


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
    """What the driver asks for to bring a GPU back."""

    NONE = auto()
    GPU_RESET = auto()
    NODE_REBOOT = auto()
    DRAIN_PEERS = auto()
    DRAIN_AND_RESET = auto()
    OTHER = auto()


@dataclass(frozen=True, slots=True)
class Absent:
    """A reading that is absent: the name of its field, the reason, and what the driver or system said."""

    field: str
    status: ReadingStatus
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ProcessKey:
    """A process of this boot; a pid alone may be reused."""

    pid: int
    started: int  # when it started, in the kernel's clock ticks since the boot


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds memory of a GPU; None where the driver or the system does not tell."""

    pid: int
    memory_used_bytes: int | None = None
    command: str | None = None
    reservation: str | None = None  # `reservations/{reservation}`; None of one that belongs to none
    # the process and those that it descends from, nearest first; empty where the agent cannot see them
    lineage: tuple[ProcessKey, ...] = ()
    holder_unknown: bool = False  # whether it cannot be told whose it is
    # the container or pod that it runs in, as its cgroup names it; empty where it runs in none
    container: str = ""
    pod: str = ""  # the UID of its pod, or namespace/name once that is known; empty where it runs in none
    mark: str = ""  # the reservation that its environment names, where anybody may write one
    user: int | None = None  # number of the Unix user
    user_name: str = (
        ""  # as the host names that user; the number in words where it names none, or has not yet
    )
    program: str = ""  # what it runs, without arguments that may be secrets
    utilization_percent: float | None = None
    memory_utilization_percent: float | None = None
    encoder_utilization_percent: float | None = None
    decoder_utilization_percent: float | None = None


class GpuReading(NamedTuple):
    """What was read of a GPU. `memory_free_bytes` is what the driver says, never total minus used.

    A tuple, since one is made of another for every GPU in every tick: that costs a frozen dataclass five times as much.
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
    def nothing(cls, status: ReadingStatus, detail: str = "") -> "GpuReading":
        """A reading in which every field is absent for one reason."""
        return cls(absent=tuple(Absent(name, status, detail) for name in GPU_FIELDS))


GPU_FIELDS: tuple[str, ...] = tuple(name for name in GpuReading._fields if name != "absent")
"""The readings of a GPU, by name; the fields of the contract's GpuReading have the same names."""

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
    """The reasons of a mask by name, in the order of NVML's bits (nvmlClocksEventReasons in nvml.h)."""
    known = len(_THROTTLE_REASONS)
    bits = (bit for bit in range(mask.bit_length()) if mask >> bit & 1)
    return tuple(_THROTTLE_REASONS[bit] if bit < known else f"bit_{bit}" for bit in bits)


@dataclass(frozen=True, slots=True)
class GpuIdentity:
    """What a GPU is. The UUID identifies it; the index is the driver's order and for display only."""

    uuid: str
    index: int
    model: str
    pci_bus_id: str = ""
    simulated: bool = False
    # of a MIG instance, such as "1g.10gb"; it has the index and address of the GPU it is a part of
    mig_profile: str = ""
    parent_uuid: str = ""  # UUID of that GPU
    divided: bool = False  # whether it is divided into MIG instances itself
    place: PciPlace = NOWHERE  # where it hangs on PCIe
    nvlinks: tuple[
        tuple[str, int], ...
    ] = ()  # UUID of another GPU of the host and how many NVLinks lead to it
    # the driver's number of a MIG instance on its GPU; None where it does not tell
    gpu_instance_id: int | None = None
    serial: str = ""  # of the board; empty where the driver does not tell, as is the next
    vbios_version: str = ""


@dataclass(frozen=True, slots=True)
class MissingGpu:
    """A GPU that the driver lists but cannot identify, or that is on the bus and not listed."""

    index: int  # in the driver's order, or after all that it lists
    pci_bus_id: str  # empty where that is not known
    problem: str  # what the driver said


@dataclass(frozen=True, slots=True)
class GpuSample:
    """What one tick read of a GPU: whether it answers, and the reading."""

    state: GpuState
    reading: GpuReading
    # UUIDs of the GPUs at the other ends of its NVLinks; None stands for a switch
    link_ends: tuple[str | None, ...] = ()
    calls: int = 0  # how often the driver was called for it
    refusals: int = 0  # how many of these calls gave an error, what the GPU does not support among them


@dataclass(frozen=True, slots=True)
class Timed(Generic[T]):
    """What a call gave, when the call was ordered and when it came back."""

    value: T
    ordered_at: float
    read_at: float


class GpuEventKind(Enum):
    """What happened on a GPU."""

    XID = auto()
    ECC_CORRECTED = auto()
    ECC_UNCORRECTED = auto()


@dataclass(frozen=True, slots=True)
class DriverEvent:
    """An event as a GPU source tells it; GpuEvent says what the fields mean."""

    uuid: str
    kind: GpuEventKind
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class GpuEvent:
    """Something that the driver said has happened on a GPU, at the moment when the agent heard of it.

    NVML's events carry no time of their own. `uuid` is that of the MIG instance where the driver names one that the
    agent knows, else that of the whole GPU. `xid` is NVIDIA's number of the fault, and None of any other kind.
    """

    uuid: str
    kind: GpuEventKind
    xid: int | None
    seen_at: float
    seen_time: datetime


class Quarantine(NamedTuple):
    """Why no new work should be placed on a GPU, and since when."""

    reason: str
    since: datetime


@dataclass(frozen=True, slots=True)
class GpuView:
    """A GPU as a snapshot shows it; `read_at` is None when it was never read, `quarantine` when all is well."""

    identity: GpuIdentity
    state: GpuState
    reading: GpuReading
    read_at: float | None
    quarantine: Quarantine | None = None
    pods: tuple[str, ...] = ()  # namespace/name of those that were given it


class NetworkAdapter(NamedTuple):
    """A network card or InfiniBand device, and where it hangs on PCIe."""

    name: str
    place: PciPlace


@dataclass(frozen=True, slots=True)
class HostIdentity:
    """What a host is; does not change while the agent runs."""

    hostname: str
    operating_system: str
    boot_id: str
    process_ids_foreign: bool = False  # whether the driver's process ids are not those that the agent sees
    network_namespace: int = 0  # number of the agent's network namespace; 0 where it is not known
    adapters: tuple[NetworkAdapter, ...] = ()


class HostReading(NamedTuple):
    """What was read of a host."""

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
    def nothing(cls, status: ReadingStatus, detail: str = "") -> "HostReading":
        """A reading in which every field is absent for one reason."""
        return cls(absent=tuple(Absent(name, status, detail) for name in HOST_FIELDS))


HOST_FIELDS: tuple[str, ...] = tuple(name for name in HostReading._fields if name != "absent")
"""The readings of a host, by name."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a GPU source found when it was opened.

    `problem` names what is amiss although the source is open, such as one GPU that cannot be identified; `has_events`
    says whether events can be waited for; `missing` are GPUs that are there, but cannot be identified.
    """

    gpus: Sequence[GpuIdentity]
    driver_version: str = ""
    cuda_version: str = ""  # such as "12.4"
    problem: str = ""
    has_events: bool = False
    missing: tuple[MissingGpu, ...] = ()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One reading of a node: its host and every GPU, as known at `taken_at`."""

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
