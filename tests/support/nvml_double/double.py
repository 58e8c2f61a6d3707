"""The control file of the NVML double: hardware that a test describes, and changes while the program runs."""

import os
import struct
import time
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpuscale.monitor.agent.nvml.field_values import GPM_METRICS, NVLINK
from gpuscale.monitor.agent.nvml.gpu_readings import METERS, SLOW
from tests.support.nvml_double.build import library_folder, preload
from tests.support.nvml_double.model import DoubleGpu, Rules

_CONFIG_VARIABLE = "NVML_DOUBLE_CONFIG"
_COUNTER = struct.Struct("<48sqQ")

_STANDARD_RECORD_BYTES = 24
XID_EVENT = 0x8


@dataclass(frozen=True, slots=True)
class CallCount:
    """How often a process called a function for a GPU; `gpu` is its place in the control file, None for no GPU."""

    function: str
    gpu: int | None
    calls: int


class NvmlDouble:
    """A machine with GPUs; change what you like, then `write`, and the next call of the library sees it.

    `gpus` is in index order. `rules` misbehave for calls that name no GPU, such as `nvmlInitWithFlags`.
    `busy_microseconds` is the CPU that each call takes, ten times as much for a list of processes.
    `moving` has every GPU busy: use, temperature, power and clock are others each second.
    `driver_lock` makes the driver serve one call on a GPU at a time, so that one slow GPU delays all.
    `process_record_bytes` is the distance of records in the v3 process lists: 32 is the fault of early 535 drivers.
    """

    def __init__(self, folder: Path, gpu_count: int = 2) -> None:
        self.folder = folder
        self.config_path = folder / "nvml-double.conf"
        self.driver_version = "550.54.15"
        self.nvml_version = "12.550.54.15"
        self.cuda_version = 12040
        self.driver_lock = False
        self.moving = False
        self.busy_microseconds = 0
        self.process_record_bytes = _STANDARD_RECORD_BYTES
        self.rules = Rules()
        self.gpus = [plain_gpu(index) for index in range(gpu_count)]
        self._generation = 1
        self._events: list[str] = []
        self._holds = 0
        self.write()

    def write(self) -> None:
        """Put the description in force, at once and as a whole."""
        text = "".join(f"{line}\n" for line in self._lines())
        draft = self.config_path.with_suffix(".new")
        draft.write_text(text)
        # The library looks at the time of the last change, which the kernel itself only keeps to some milliseconds.
        now = time.time_ns()
        os.utime(draft, ns=(now, now))
        draft.replace(self.config_path)

    def reload_driver(self) -> None:
        """Load the driver anew: every handle is dead, and calls fail until the library was ended and started."""
        self._generation += 1
        self.write()

    def power_limit(self, gpu: int = 0) -> float | None:
        """The power limit that was set of a GPU, in watts; None where none was since the boot."""
        path = self._limit(gpu)
        return int(path.read_text()) / 1000 if path.exists() else None

    def instances(self) -> list[tuple[str, int]]:
        """Profile and first slice of each complete instance of the first GPU, once any was made or destroyed."""
        lines = self._made.read_text().splitlines()[1:] if self._made.exists() else []
        found = [line.split() for line in lines]
        return sorted((one[2], int(one[3])) for one in found if int(one[0]) == 0 and int(one[4]))

    def boot(self) -> None:
        """Start the host anew: limits are those of the factory, and the driver is another."""
        self._made.unlink(missing_ok=True)
        for gpu in range(len(self.gpus)):
            self._limit(gpu).unlink(missing_ok=True)
        self.reload_driver()

    @property
    def _made(self) -> Path:
        return self.folder / f"{self.config_path.name}.mig"

    def _limit(self, gpu: int) -> Path:
        return self.folder / f"{self.config_path.name}.limit.{gpu}"

    def fail(self, function: str, code: int) -> None:
        """Let a call that names no GPU return a code; SUCCESS ends that."""
        self.rules.codes[function] = code

    def fail_start(self, code: int) -> None:
        """Let every start of the library fail, such as with DRIVER_NOT_LOADED; SUCCESS ends that."""
        for function in ("nvmlInitWithFlags", "nvmlInit_v2"):
            self.fail(function, code)

    def hold(self, rules: Rules, function: str = "*") -> Path:
        """Let calls under these rules block (after `write`) until the file of the returned path exists."""
        self._holds += 1
        rules.holds[function] = path = self.folder / f"release-{self._holds}"
        return path

    def release_all(self) -> None:
        """Let every blocked call go on."""
        for number in range(1, self._holds + 1):
            (self.folder / f"release-{number}").touch()

    def raise_event(self, gpu: int, data: int, event_type: int = XID_EVENT) -> None:
        """Let an event happen on a GPU and put it in force; `data` is the XID of an XID event."""
        self._events.append(f"event {len(self._events) + 1} {gpu} {event_type} {data}")
        self.write()

    def call_counts(self, pid: int | None = None) -> list[CallCount]:
        """The calls of one process, or of all that ever used this control file."""
        found: Counter[tuple[str, int]] = Counter()
        for path in self.folder.glob(f"{self.config_path.name}.calls.{'*' if pid is None else pid}"):
            for name, gpu, calls in _COUNTER.iter_unpack(path.read_bytes()):
                if calls:
                    found[name.rstrip(b"\0").decode(), gpu] += calls
        return [
            CallCount(name, None if gpu < 0 else gpu, calls) for (name, gpu), calls in sorted(found.items())
        ]

    def calls(self, function: str | None = None, gpu: int | None = None, pid: int | None = None) -> int:
        """The number of calls, of one function and for one GPU if asked."""
        found = [one for one in self.call_counts(pid) if function in (None, one.function)]
        return sum(count.calls for count in found if gpu in (None, count.gpu))

    def _lines(self) -> Iterator[str]:
        yield f"system driver_version {self.driver_version}"
        yield f"system nvml_version {self.nvml_version}"
        yield f"system cuda_version {self.cuda_version}"
        yield f"system generation {self._generation}"
        yield f"system driver_lock {self.driver_lock:d}"
        yield f"system moving {self.moving:d}"
        yield f"system busy_us {self.busy_microseconds}"
        yield f"system record_bytes {self.process_record_bytes}"
        yield from (f"system {line}" for line in self.rules.lines())
        # Whole GPUs come first: below their number, a place in the file is the index of the library.
        place = len(self.gpus)
        for index, gpu in enumerate(self.gpus):
            yield from (f"gpu {index} {line}" for line in gpu.lines(None, None))
        for index, gpu in enumerate(self.gpus):
            for mig_index, device in enumerate(gpu.mig_devices):
                yield from (f"gpu {place} {line}" for line in device.lines(index, mig_index))
                place += 1
        yield from self._events


FIELD_IDS: dict[int, str] = {
    key if isinstance(key, int) else key[0]: field.name
    for field in (*METERS, *SLOW, *NVLINK)
    for key in field.keys
} | {165: "nvlink_active_count"}
"""What is read by each of NVML's ids of fields."""

HEALTHY_FIELDS: dict[int, int | float] = {
    **dict.fromkeys(FIELD_IDS, 0),
    82: 47,  # temperature of memory, degrees Celsius
    83: 5_000_000,  # energy, mJ
    138: 2_000,  # NVLink data sent and received, KiB
    139: 3_000,
    165: 1,  # an NVLink is up
    1: 1,  # ECC is on
    2: 1,
    187: 200_000,  # lowest, highest and default power limit, mW
    188: 700_000,
    189: 700_000,
    197: 4_000_000,  # bytes sent and received over PCIe
    198: 6_000_000,
}
"""Field values of a GPU that supports all of those that are read, by NVML's ids."""


def plain_gpu(index: int) -> DoubleGpu:
    """An idle GPU that differs from the others in uuid, bus id, serial and minor number."""
    return DoubleGpu(
        uuid=f"GPU-00000000-0000-4000-8000-{index:012d}",
        pci_bus_id=f"00000000:{0x1B + index:02X}:00.0",
        serial=f"1650{index:09d}",
        vbios=f"96.00.99.00.{index:02X}",
        minor_number=index,
        fields=dict(HEALTHY_FIELDS),
        activity=dict.fromkeys(GPM_METRICS.values(), 0.0),
    )


def divide(gpu: DoubleGpu, *profiles: str) -> None:
    """Switch its MIG mode on, with idle instances of these profiles of an H100; `write` puts that in force."""
    gpu.mig_mode, gpu.utilization_percent = 1, None
    gpu.mig_devices = [
        DoubleGpu(
            f"MIG-{gpu.uuid[-1]}-{number}",
            f"{gpu.name} MIG {profile}",
            memory_total_bytes=int(profile.partition(".")[2].removesuffix("gb")) << 30,
            gpu_instance=number,
            compute_instance=0,
        )
        for number, profile in enumerate(profiles)
    ]


def wired_gpus(count: int) -> list[DoubleGpu]:
    """Idle GPUs that are wired to a switch by four NVLinks each."""
    gpus = [plain_gpu(index) for index in range(count)]
    for gpu in gpus:
        gpu.nvlinks = [-1] * 4
    return gpus


def env_with_double(double: NvmlDouble) -> dict[str, str]:
    """The environment of a process that shall find the double where it asks for the driver's library."""
    before = os.environ.get("LD_LIBRARY_PATH")
    path = os.pathsep.join([str(library_folder()), *([before] if before else [])])
    return {**os.environ, "LD_LIBRARY_PATH": path, _CONFIG_VARIABLE: str(double.config_path)}


@contextmanager
def in_process(double: NvmlDouble) -> Generator[NvmlDouble, None, None]:
    """Let this process find the double; on leaving, blocked calls go on and the library is "not found" again.

    The double stays loaded for as long as the process lives, so a process that wants a real driver must not use this.

    Raises RuntimeError: a real driver's library is loaded already, or the double cannot be built.
    """
    preload()
    os.environ[_CONFIG_VARIABLE] = str(double.config_path)
    try:
        yield double
    finally:
        double.release_all()
        del os.environ[_CONFIG_VARIABLE]
