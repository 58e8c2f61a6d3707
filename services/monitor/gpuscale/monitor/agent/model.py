"""What the agent reads, as immutable values.

A reading that was not obtained is None and stands in `absent` with the reason; it is never zero. Units are in the
names: bytes, watts, degrees Celsius, megahertz, and percent of 0-100. Times are seconds of the agent's clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum, auto
from typing import Generic, TypeVar

T = TypeVar("T")


class ReadingStatus(Enum):
    """Why a reading is absent."""

    NOT_SUPPORTED = auto()
    NO_PERMISSION = auto()
    TIMEOUT = auto()
    LOST = auto()
    ERROR = auto()
    STALE = auto()


class GpuState(Enum):
    """Whether a GPU answers."""

    OK = auto()
    DEGRADED = auto()
    SLOW = auto()
    HUNG = auto()
    LOST = auto()
    RESET_REQUIRED = auto()


@dataclass(frozen=True, slots=True)
class Absent:
    """A reading that is absent: the name of its field, the reason, and what the driver or system said."""

    field: str
    status: ReadingStatus
    detail: str = ""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds memory of a GPU; None where the driver or the system does not tell."""

    pid: int
    memory_used_bytes: int | None = None
    command: str | None = None


@dataclass(frozen=True, slots=True)
class GpuReading:
    """What was read of a GPU. `memory_free_bytes` is what the driver says, never total minus used."""

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
    absent: tuple[Absent, ...] = ()

    @classmethod
    def nothing(cls, status: ReadingStatus, detail: str = "") -> "GpuReading":
        """A reading in which every field is absent for one reason."""
        return cls(absent=tuple(Absent(name, status, detail) for name in GPU_FIELDS))


GPU_FIELDS: tuple[str, ...] = tuple(name for name in GpuReading.__slots__ if name != "absent")
"""The readings of a GPU, by name."""


@dataclass(frozen=True, slots=True)
class GpuIdentity:
    """What a GPU is. The UUID identifies it; the index is the driver's order and for display only."""

    uuid: str
    index: int
    model: str
    pci_bus_id: str = ""
    simulated: bool = False


@dataclass(frozen=True, slots=True)
class GpuSample:
    """What one tick read of a GPU: whether it answers, and the reading."""

    state: GpuState
    reading: GpuReading


@dataclass(frozen=True, slots=True)
class Timed(Generic[T]):
    """What a call gave, when the call was ordered and when it came back."""

    value: T
    ordered_at: float
    read_at: float


@dataclass(frozen=True, slots=True)
class GpuView:
    """A GPU as a snapshot shows it; `read_at` is None when it was never read."""

    identity: GpuIdentity
    state: GpuState
    reading: GpuReading
    read_at: float | None


@dataclass(frozen=True, slots=True)
class HostIdentity:
    """What a host is; does not change while the agent runs."""

    hostname: str
    operating_system: str
    boot_id: str


@dataclass(frozen=True, slots=True)
class HostReading:
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
    absent: tuple[Absent, ...] = ()

    @classmethod
    def nothing(cls, status: ReadingStatus, detail: str = "") -> "HostReading":
        """A reading in which every field is absent for one reason."""
        return cls(absent=tuple(Absent(name, status, detail) for name in HOST_FIELDS))


HOST_FIELDS: tuple[str, ...] = tuple(name for name in HostReading.__slots__ if name != "absent")
"""The readings of a host, by name."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a GPU source found when it was opened.

    `problem` names what is amiss although the source is open, such as one GPU that cannot be identified.
    """

    gpus: Sequence[GpuIdentity]
    driver_version: str = ""
    problem: str = ""


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
    gpus: tuple[GpuView, ...] = field(default=())
    gpu_problem: str = ""
    simulated: bool = False
