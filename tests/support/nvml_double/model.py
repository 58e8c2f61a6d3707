"""What a control file says about one GPU, and how it is written down."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

GIB = 1024**3

# How the library says that it cannot tell a process's memory.
_NOT_AVAILABLE = 2**64 - 1

# XID errors, both kinds of ECC errors, performance state and clock changes.
_USUAL_EVENTS = 0x1F


class NvmlReturn(IntEnum):
    """The library's result codes that tests ask for."""

    SUCCESS = 0
    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    INSUFFICIENT_SIZE = 7
    DRIVER_NOT_LOADED = 9
    TIMEOUT = 10
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    LIB_RM_VERSION_MISMATCH = 18
    IN_USE = 19
    UNKNOWN = 999


class ProcessKind(IntEnum):
    """Which of the library's process lists names a process."""

    COMPUTE = 0
    GRAPHICS = 1
    MPS = 2


@dataclass
class DoubleProcess:
    """A process on a GPU; `used_bytes` None is "not available", and `sm_percent` None no sample of its use."""

    pid: int
    used_bytes: int | None = GIB
    kind: ProcessKind = ProcessKind.COMPUTE
    gpu_instance: int = 0xFFFFFFFF
    compute_instance: int = 0xFFFFFFFF
    sm_percent: int | None = None
    memory_percent: int = 0
    encoder_percent: int = 0
    decoder_percent: int = 0


@dataclass
class Rules:
    """How calls misbehave, by function name; "*" is every call.

    `codes` are returned in place of a reading (a named function goes before "*"), and a call in `holds` blocks until
    the file exists.
    """

    codes: dict[str, int] = field(default_factory=dict[str, int])
    holds: dict[str, Path] = field(default_factory=dict[str, Path])

    def lines(self) -> Iterator[str]:
        """The statements of the control file; the last code that applies wins, so "*" stands first."""
        for function in sorted({*self.codes, *self.holds}, key=lambda name: (name != "*", name)):
            yield f"rule {function} {int(self.codes.get(function, 0))} {self.holds.get(function, '-')}"


@dataclass
class DoubleGpu:
    """One GPU, or one MIG device in `mig_devices` of its GPU. A number that is None is not supported by it.

    `fields` are field values by id, whatever the scope: an int or a float; other ids are not supported. `nvlinks` holds
    the GPU at the other end of each link, by index, or -1 for a switch.
    """

    uuid: str
    name: str = "NVIDIA H100 80GB HBM3"
    pci_bus_id: str = ""
    serial: str = ""
    vbios: str = ""
    memory_total_bytes: int | None = 80 * GIB
    memory_used_bytes: int = 0
    memory_reserved_bytes: int = GIB // 2
    memory_free_bytes: int | None = None  # None: what used and reserved leave
    utilization_percent: int | None = 0
    memory_utilization_percent: int = 0
    encoder_percent: int | None = 0
    decoder_percent: int | None = 0
    temperature_celsius: int | None = 40
    power_watts: float | None = 70.0
    power_limit_watts: float | None = 700.0
    enforced_power_limit_watts: float | None = 700.0
    energy_joules: float | None = 1000.0
    sm_clock_mhz: int | None = 1980
    memory_clock_mhz: int | None = 2619
    video_clock_mhz: int | None = 1545
    max_sm_clock_mhz: int | None = 1980
    max_memory_clock_mhz: int | None = 2619
    performance_state: int | None = 0
    event_reasons: int | None = 1
    mig_mode: int | None = 0
    mig_mode_pending: int | None = None  # None: as the mode
    max_mig_devices: int = 7
    gpu_instance: int | None = None
    compute_instance: int | None = None
    compute_capability: tuple[int, int] = (9, 0)
    minor_number: int | None = 0
    numa_node: int | None = None
    persistence_mode: int | None = 1
    compute_mode: int | None = 0
    fan_percent: int | None = 30
    bar1_total_bytes: int | None = 128 * GIB
    bar1_used_bytes: int = 0
    vgpu_licensed: int | None = 1
    links_down: int = 0  # of the last NVLinks
    supported_events: int | None = _USUAL_EVENTS
    pcie_generation: int | None = 5
    pcie_width: int | None = 16
    ecc_corrected: int | None = 0
    ecc_uncorrected: int | None = 0
    remapped_rows: tuple[int, int, int, int] | None = (0, 0, 0, 0)  # corrected, uncorrected, pending, failed
    processes: list[DoubleProcess] = field(default_factory=list[DoubleProcess])
    fields: dict[int, int | float] = field(default_factory=dict[int, int | float])
    activity: dict[int, float] = field(default_factory=dict[int, float])  # by GPM's ids; empty: it has no GPM
    nvlinks: list[int] = field(default_factory=list[int])
    mig_devices: list["DoubleGpu"] = field(default_factory=list["DoubleGpu"])
    rules: Rules = field(default_factory=Rules)

    def fail(self, function: str, code: int) -> None:
        """Let calls of a function ("*" for all) return a code; SUCCESS ends that."""
        self.rules.codes[function] = code

    def lines(self, parent: int | None, mig_index: int | None) -> Iterator[str]:
        """The statements of the control file, without the leading words that name the GPU."""
        yield from self._texts()
        for key, number in {**self._board(), **self._readings()}.items():
            yield f"{key} {-1 if number is None else round(number)}"
        yield f"parent {-1 if parent is None else parent}"
        yield f"mig_index {-1 if mig_index is None else mig_index}"
        for process in self.processes:
            used = _NOT_AVAILABLE if process.used_bytes is None else process.used_bytes
            instances = f"{process.gpu_instance} {process.compute_instance}"
            others = f"{process.memory_percent} {process.encoder_percent} {process.decoder_percent}"
            use = -1 if process.sm_percent is None else process.sm_percent
            yield f"process {process.kind:d} {process.pid} {used} {instances} {use} {others}"
        for field_id, value in self.fields.items():
            yield f"field {field_id} {0 if isinstance(value, float) else 3} {value}"
        for metric, share in self.activity.items():
            yield f"activity {metric} {share}"
        for peer in self.nvlinks:
            yield f"nvlink {peer}"
        yield from self.rules.lines()

    def _texts(self) -> Iterator[str]:
        for key in ("name", "uuid", "serial", "vbios"):
            yield f"{key} {getattr(self, key)}"
        yield f"pci_bus_id {self.pci_bus_id}"

    def _board(self) -> dict[str, float | None]:
        pending = self.mig_mode if self.mig_mode_pending is None else self.mig_mode_pending
        return {
            "mig_mode": self.mig_mode,
            "mig_mode_pending": pending,
            "max_mig_devices": self.max_mig_devices,
            "gpu_instance": self.gpu_instance,
            "compute_instance": self.compute_instance,
            "compute_major": self.compute_capability[0],
            "compute_minor": self.compute_capability[1],
            "minor_number": self.minor_number,
            "numa_node": self.numa_node,
            "persistence_mode": self.persistence_mode,
            "compute_mode": self.compute_mode,
            "fan": self.fan_percent,
            "bar1_total": self.bar1_total_bytes,
            "bar1_used": self.bar1_used_bytes,
            "vgpu_licensed": self.vgpu_licensed,
            "links_down": self.links_down,
            "supported_events": self.supported_events,
            "pcie_generation": self.pcie_generation,
            "pcie_width": self.pcie_width,
            "max_sm_clock": self.max_sm_clock_mhz,
            "max_memory_clock": self.max_memory_clock_mhz,
            "power_limit_mw": _thousandths(self.power_limit_watts),
            "enforced_power_limit_mw": _thousandths(self.enforced_power_limit_watts),
        }

    def _readings(self) -> dict[str, float | None]:
        free = self.memory_free_bytes
        if free is None and self.memory_total_bytes is not None:
            free = self.memory_total_bytes - self.memory_used_bytes - self.memory_reserved_bytes
        rows = self.remapped_rows or (None, None, None, None)
        return {
            "memory_total": self.memory_total_bytes,
            "memory_free": free,
            "memory_used": self.memory_used_bytes,
            "memory_reserved": self.memory_reserved_bytes,
            "utilization": self.utilization_percent,
            "memory_utilization": self.memory_utilization_percent,
            "encoder": self.encoder_percent,
            "decoder": self.decoder_percent,
            "temperature": self.temperature_celsius,
            "power_mw": _thousandths(self.power_watts),
            "energy_mj": _thousandths(self.energy_joules),
            "sm_clock": self.sm_clock_mhz,
            "memory_clock": self.memory_clock_mhz,
            "video_clock": self.video_clock_mhz,
            "performance_state": self.performance_state,
            "event_reasons": self.event_reasons,
            "ecc_corrected": self.ecc_corrected,
            "ecc_uncorrected": self.ecc_uncorrected,
            "remapped_corrected": rows[0],
            "remapped_uncorrected": rows[1],
            "remap_pending": rows[2],
            "remap_failed": rows[3],
        }


def _thousandths(value: float | None) -> float | None:
    return None if value is None else value * 1000
