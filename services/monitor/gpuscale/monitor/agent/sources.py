"""Where the agent reads GPUs from: what a source must offer, simulated GPUs, and which source a setting means.

Every method of a source blocks and is called in worker threads only; a property does not block. `GpuSource.open` and
`close` are never called while any other method of the source runs. `read` and `probe` are called for several GPUs at
once, but never twice at once for one GPU; `wait_event` runs beside them in a thread of its own.
"""

import importlib.util
import math
from collections.abc import Callable
from typing import Any, Literal, Protocol
from uuid import NAMESPACE_URL, UUID, uuid5

from gpuscale.common.errors import FailedPreconditionError
from gpuscale.monitor.agent.processes import ProcessNames
from gpuscale.monitor.model.admission import Admissions
from gpuscale.monitor.model.readings import (
    GPU_FIELDS,
    DriverEvent,
    GpuIdentity,
    GpuReading,
    GpuSample,
    GpuState,
    HostIdentity,
    HostReading,
    Inventory,
    RecoveryAction,
)


class GpuSourceError(Exception):
    """The GPUs of this host cannot be read at all; the text says why, such as "NVML: driver not loaded".

    `no_driver` is True where the host simply has no driver, False where one is there but fails.
    """

    def __init__(self, problem: str, *, no_driver: bool = False) -> None:
        super().__init__(problem)
        self.problem = problem
        self.no_driver = no_driver


class GpuSource(Protocol):
    """Reads the GPUs of this host."""

    @property
    def simulated(self) -> bool:
        """Whether no hardware stands behind what it reads."""
        ...

    @property
    def outdated(self) -> bool:
        """Whether what `open` found is known to have changed, such as the MIG instances of a GPU."""
        ...

    def open(self) -> Inventory:
        """Find the GPUs, again after a `close` or driver reload; GpuSourceError if none can be read."""
        ...

    def read(self, uuid: str) -> GpuSample:
        """Read a GPU of the last inventory, what fails as absent; GpuSourceError if the source must be opened anew."""
        ...

    def probe(self, uuid: str) -> None:
        """Ask a GPU of the last inventory one cheap question; any answer will do. GpuSourceError as in `read`."""
        ...

    def wait_event(self, timeout: float) -> DriverEvent | None:
        """Wait at most `timeout` seconds for the next event of any GPU; None where there was none in time.

        Only where the inventory says that there are events.
        """
        ...

    def interrupt(self) -> bool:
        """End every pending call with a GpuSourceError, so that the source can be opened again.

        Returns whether that can be done at all, which it cannot where the driver is called in this process. Does not
        block, and may be called at any time.
        """
        ...

    def close(self) -> None:
        """Release the driver. Never raises."""
        ...


class HostSource(Protocol):
    """Reads the host."""

    def identity(self) -> HostIdentity:
        """What the host is."""
        ...

    def read(self) -> HostReading:
        """Read the host. A reading that fails is absent with its reason."""
        ...


GIB = 1024**3
MEMORY_TOTAL_BYTES = 80 * GIB
MEMORY_RESERVED_BYTES = GIB // 2
MEMORY_USED_BYTES = GIB // 4

_NAMESPACE = uuid5(NAMESPACE_URL, "gpuscale:simulated-gpu")
_RIPPLE_SECONDS = 120.0
_IDLE, _BUSY = 5.0, 50.0
_USED_BY_EACH_BYTES, _MOST_BUSY = 12 * GIB, 6


_COUNTERS = (
    "_count",
    "_sent_bytes",
    "_received_bytes",
    "_per_second",
    "_activity_percent",
    "_occupancy_percent",
    "_seconds",
)
_STEADY = GpuReading(
    **dict[str, Any]((name, 0) for name in GPU_FIELDS if name.endswith(_COUNTERS)),
    memory_total_bytes=MEMORY_TOTAL_BYTES,
    memory_used_bytes=MEMORY_USED_BYTES,
    memory_free_bytes=MEMORY_TOTAL_BYTES - MEMORY_RESERVED_BYTES - MEMORY_USED_BYTES,
    memory_reserved_bytes=MEMORY_RESERVED_BYTES,
    power_limit_watts=400.0,
    power_limit_default_watts=400.0,
    power_limit_min_watts=100.0,
    power_limit_max_watts=400.0,
    sm_clock_mhz=345.0,
    memory_clock_mhz=1593.0,
    video_clock_mhz=765.0,
    sm_clock_max_mhz=1410.0,
    memory_clock_max_mhz=1593.0,
    bar1_total_bytes=128 * GIB,
    bar1_used_bytes=GIB // 64,
    bar1_free_bytes=128 * GIB - GIB // 64,
    fan_speed_percent=30.0,
    compute_mode=0,
    persistence_mode=True,
    ecc_mode=True,
    ecc_mode_pending=True,
    vgpu_licensed=True,
    performance_state=8,
    throttle_reason_mask=1,
    processes=(),
    encoder_utilization_percent=0.0,
    decoder_utilization_percent=0.0,
    pcie_link_generation=4,
    pcie_link_width=16,
    retired_pages_pending=False,
    remapped_rows_pending=False,
    remapped_rows_failed=False,
    recovery_action=RecoveryAction.NONE,
)
"""What does not move: nothing is sent, and no error counted."""


def simulated_uuid(node: str, index: int) -> str:
    """The UUID of a simulated GPU: the same at every start."""
    return f"SIM-{uuid5(_NAMESPACE, f'{node}/{index}')}"


class SimulatedSource:
    """A number of simulated GPUs of a node, which are busy while a process that was admitted on them runs.

    `now` gives seconds of any clock.
    """

    simulated = True
    outdated = False

    def __init__(
        self, node: str, count: int, now: Callable[[], float], admitted: Callable[[], Admissions] = Admissions
    ) -> None:
        self._now = now
        self._admitted = admitted
        self._names = ProcessNames()
        self._gpus = tuple(
            GpuIdentity(
                uuid=simulated_uuid(node, index), index=index, model="Simulated GPU 80GB", simulated=True
            )
            for index in range(count)
        )
        self._phases = {gpu.uuid: (UUID(gpu.uuid[4:]).int % 997) / 997 for gpu in self._gpus}
        self._meters = {gpu.uuid: (now(), 0.0) for gpu in self._gpus}  # when they were read, and their joules

    def open(self) -> Inventory:
        """List them."""
        return Inventory(self._gpus)

    def read(self, uuid: str) -> GpuSample:
        """Figures of an idle or a busy GPU at this time."""
        now = self._now()
        turn = now / _RIPPLE_SECONDS + self._phases[uuid]
        ripple = (1 + math.sin(2 * math.pi * turn)) / 2
        running = [
            worker.process.pid
            for worker in self._admitted().workers
            if uuid in worker.uuids and self._names.runs(worker.process)
        ]
        used = MEMORY_USED_BYTES + min(len(running), _MOST_BUSY) * _USED_BY_EACH_BYTES
        load = _BUSY if running else _IDLE
        used_percent = round(load * ripple + (load - _IDLE), 1)
        power, (before, joules) = round(62 + 2.4 * load * ripple + 4 * (load - _IDLE), 1), self._meters[uuid]
        joules += power * (now - before)
        self._meters[uuid] = (now, joules)
        return GpuSample(
            GpuState.OK,
            _STEADY._replace(
                utilization_percent=used_percent,
                graphics_activity_percent=used_percent,
                sm_activity_percent=round(used_percent * 0.8, 1),
                tensor_activity_percent=round(used_percent * 0.3, 1),
                memory_bandwidth_percent=round(used_percent * 0.4, 1),
                memory_utilization_percent=round(load * ripple / 2, 1),
                memory_used_bytes=used,
                memory_free_bytes=MEMORY_TOTAL_BYTES - MEMORY_RESERVED_BYTES - used,
                temperature_celsius=round(31 + 0.8 * load * ripple, 1),
                memory_temperature_celsius=round(34 + 0.8 * load * ripple, 1),
                power_watts=power,
                energy_joules=round(joules, 1),
                sm_clock_mhz=1410.0 if running else 345.0,
                throttle_reason_mask=int(not running),
                processes=self._names.merge((pid, _USED_BY_EACH_BYTES) for pid in running),
            ),
        )

    def probe(self, uuid: str) -> None:
        """It answers."""

    def wait_event(self, timeout: float) -> DriverEvent | None:
        """Nothing ever happens on them."""

    def interrupt(self) -> bool:
        """No call of them is ever out for long."""
        return False

    def close(self) -> None:
        """Nothing is held."""


SourceKind = Literal["nvml", "simulated", "auto"]


class AutoSource:
    """Real GPUs if the host has a driver when it is first opened, even one that fails; else simulated ones."""

    def __init__(self, real: GpuSource, simulated: GpuSource) -> None:
        self._simulated = simulated
        self._source = real
        self._chosen = False

    @property
    def simulated(self) -> bool:
        """Whether the simulated GPUs were chosen; False before the choice."""
        return self._source is self._simulated

    @property
    def outdated(self) -> bool:
        """As the chosen source says."""
        return self._source.outdated

    def open(self) -> Inventory:
        """Choose at the first call, and open; GpuSourceError if there is a driver, and it fails."""
        first, self._chosen = not self._chosen, True
        try:
            return self._source.open()
        except GpuSourceError as error:
            if not first or not error.no_driver:
                raise
        self._source.close()
        self._source = self._simulated
        return self._source.open()

    def read(self, uuid: str) -> GpuSample:
        """Read one GPU of the last inventory."""
        return self._source.read(uuid)

    def probe(self, uuid: str) -> None:
        """Ask one GPU of the last inventory a question."""
        self._source.probe(uuid)

    def wait_event(self, timeout: float) -> DriverEvent | None:
        """Wait for an event of the chosen source."""
        return self._source.wait_event(timeout)

    def interrupt(self) -> bool:
        """End the calls of the chosen source, where that can be done."""
        return self._source.interrupt()

    def close(self) -> None:
        """Release the driver."""
        self._source.close()


def make_source(
    kind: SourceKind,
    node: str,
    simulated_count: int,
    now: Callable[[], float],
    *,
    isolate: bool = False,
    admitted: Callable[[], Admissions] = Admissions,
) -> GpuSource:
    """The source of that kind; `isolate` has real GPUs read in a process of its own.

    What was `admitted` makes simulated GPUs busy. FailedPreconditionError for `nvml` without nvidia-ml-py.
    """
    simulated = SimulatedSource(node, simulated_count, now, admitted)
    if kind == "simulated":
        return simulated
    if importlib.util.find_spec("pynvml") is None:
        if kind == "auto":
            return simulated
        raise FailedPreconditionError(
            "reading GPUs needs nvidia-ml-py: pip install 'gpuscale[agent]'", reason="NVML_NOT_INSTALLED"
        )
    real: GpuSource
    if isolate:  # only the child loads pynvml
        from gpuscale.monitor.agent.isolated import IsolatedSource

        real = IsolatedSource()
    else:
        from gpuscale.monitor.agent.nvml import NvmlSource

        real = NvmlSource(now)
    return real if kind == "nvml" else AutoSource(real, simulated)
