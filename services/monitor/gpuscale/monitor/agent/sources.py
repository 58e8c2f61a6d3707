"""Sources of GPU readings: their interface, simulated GPUs, and the choice by setting.

Methods of a source block and run in worker threads; properties do not block. `GpuSource.open` and `close` never run at the same
time as another method. `read` and `probe` run for several GPUs at a time, but once per GPU; `wait_event` has its own thread.
"""

import importlib.util
import math
from collections.abc import Callable
from typing import Any, Literal, Protocol
from uuid import NAMESPACE_URL, UUID, uuid5

from gpuscale.common.errors import FailedPreconditionError
from gpuscale.monitor.agent.processes import ProcessNames
from gpuscale.monitor.model import readings
from gpuscale.monitor.model.admission import Admissions


class GpuSourceError(Exception):
    """No GPU of this host can be read; `problem` says why, such as "NVML: driver not loaded".

    `no_driver`: whether the host has no driver, rather than one that fails.
    """

    def __init__(self, problem: str, *, no_driver: bool = False) -> None:
        super().__init__(problem)
        self.problem = problem
        self.no_driver = no_driver


class GpuSource(Protocol):
    """Reads the GPUs of this host."""

    @property
    def simulated(self) -> bool:
        """Whether the GPUs are simulated."""
        ...

    @property
    def outdated(self) -> bool:
        """Whether the inventory is known to have changed since `open`, such as MIG instances."""
        ...

    def open(self) -> readings.Inventory:
        """Find the GPUs, also again after `close`. GpuSourceError if none can be read."""
        ...

    def read(self, uuid: str) -> readings.GpuSample:
        """Read a GPU of the last inventory; failed readings are absent. GpuSourceError if the source must be reopened."""
        ...

    def probe(self, uuid: str) -> None:
        """Make one cheap call to a GPU, whatever its answer. GpuSourceError as in `read`."""

    def wait_event(self, timeout: float) -> readings.DriverEvent | None:
        """Wait up to `timeout` seconds for an event of any GPU; None if there was none. Needs `Inventory.has_events`."""
        ...

    def interrupt(self) -> bool:
        """End every pending call with a GpuSourceError, without blocking, at any time.

        Returns False if the source cannot, because it calls the driver in this process.
        """
        ...

    def close(self) -> None:
        """Release the driver. Never raises."""


GIB = 1024**3
MEMORY_TOTAL_BYTES = 80 * GIB
MEMORY_RESERVED_BYTES = GIB // 2
MEMORY_USED_BYTES = GIB // 4

_NAMESPACE = uuid5(NAMESPACE_URL, "gpuscale:simulated-gpu")
_RIPPLE_SECONDS = 120.0
_IDLE, _BUSY = 5.0, 50.0
_USED_BY_EACH_BYTES, _MOST_BUSY = 12 * GIB, 6


_STEADY = readings.GpuReading(**dict[str, Any]((name, 0) for name in readings.GPU_FIELDS))._replace(
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
    persistence_mode=True,
    ecc_mode=True,
    ecc_mode_pending=True,
    vgpu_licensed=True,
    performance_state=8,
    throttle_reason_mask=1,
    processes=(),
    pcie_link_generation=4,
    pcie_link_width=16,
    retired_pages_pending=False,
    remapped_rows_pending=False,
    remapped_rows_failed=False,
    recovery_action=readings.RecoveryAction.NONE,
)
"""The readings that never change; what is not named is 0: no traffic, no errors."""


def simulated_uuid(node: str, index: int) -> str:
    """The UUID of a simulated GPU, the same on every start."""
    return f"SIM-{uuid5(_NAMESPACE, f'{node}/{index}')}"


class SimulatedSource:
    """Simulated GPUs of a node, each busy while a process that was admitted on it runs. `now`: a clock, in seconds."""

    simulated = True
    outdated = False

    def __init__(
        self, node: str, count: int, now: Callable[[], float], admitted: Callable[[], Admissions] = Admissions
    ) -> None:
        self._now = now
        self._admitted = admitted
        self._names = ProcessNames()
        self._gpus = tuple(
            readings.GpuIdentity(
                uuid=simulated_uuid(node, index), index=index, model="Simulated GPU 80GB", simulated=True
            )
            for index in range(count)
        )
        self._phases = {gpu.uuid: (UUID(gpu.uuid[4:]).int % 997) / 997 for gpu in self._gpus}
        self._meters = {gpu.uuid: (now(), 0.0) for gpu in self._gpus}  # last read at, joules until then

    def open(self) -> readings.Inventory:
        """List the GPUs."""
        return readings.Inventory(self._gpus)

    def read(self, uuid: str) -> readings.GpuSample:
        """Readings of an idle or busy GPU at this time."""
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
        return readings.GpuSample(
            readings.GpuState.OK,
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
        """Do nothing: it always answers."""

    def wait_event(self, timeout: float) -> readings.DriverEvent | None:
        """No events."""

    def interrupt(self) -> bool:
        """Not supported and never needed."""
        return False

    def close(self) -> None:
        """Do nothing."""


SourceKind = Literal["nvml", "simulated", "auto"]


class AutoSource:
    """Real GPUs if the host has a driver at the first `open`, even a failing one; else simulated GPUs."""

    def __init__(self, real: GpuSource, simulated: GpuSource) -> None:
        self._simulated = simulated
        self._source = real  # replaced in one step: other threads call it meanwhile
        self._chosen = False

    @property
    def simulated(self) -> bool:
        """Whether simulated GPUs were chosen."""
        return self._source is self._simulated

    @property
    def outdated(self) -> bool:
        """As of the chosen source."""
        return self._source.outdated

    def open(self) -> readings.Inventory:
        """Choose on the first call, and open. GpuSourceError if there is a driver and it fails."""
        first, self._chosen = not self._chosen, True
        try:
            return self._source.open()
        except GpuSourceError as error:
            if not first or not error.no_driver:
                raise
        self._source.close()
        self._source = self._simulated
        return self._source.open()

    def read(self, uuid: str) -> readings.GpuSample:
        """Read a GPU."""
        return self._source.read(uuid)

    def probe(self, uuid: str) -> None:
        """Probe a GPU."""
        self._source.probe(uuid)

    def wait_event(self, timeout: float) -> readings.DriverEvent | None:
        """Wait for an event."""
        return self._source.wait_event(timeout)

    def interrupt(self) -> bool:
        """Interrupt the chosen source."""
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
    """The source of that kind. `isolate`: read real GPUs in a child process. `admitted`: makes simulated GPUs busy.

    FailedPreconditionError for `nvml` without nvidia-ml-py.
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
