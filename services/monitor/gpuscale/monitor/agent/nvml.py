"""GPUs through NVML, the driver's own library (nvidia-ml-py). The only file that imports pynvml.

Seven calls per GPU and tick, which on a real driver are what an agent costs; the process lists, the dearest, every 5 s
and the power limit every 30 s. Figures leave here in bytes, watts and percent. Memory is NVML's v2 record where there
is one, since the v1 record counts what the driver keeps for itself as used.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pynvml

from gpuscale.monitor.agent.asking import Asking, Failure, Kept, Unsupported
from gpuscale.monitor.agent.model import (
    GpuIdentity,
    GpuProcess,
    GpuReading,
    GpuSample,
    GpuState,
    Inventory,
    ReadingStatus,
)
from gpuscale.monitor.agent.ports import GpuSourceError
from gpuscale.monitor.agent.processes import ProcessNames

PROCESSES_EVERY_SECONDS = 5.0
LIMIT_EVERY_SECONDS = 30.0

_MILLI = 1000.0
_HIGHEST_CELSIUS = 300.0
_HIGHEST_WATTS = 100_000.0
_HIGHEST_MHZ = 1_000_000.0
_HIGHEST_PERFORMANCE_STATE = 15  # 32 is NVML's "unknown"
_UTILIZATION_FIELDS = ("utilization_percent", "memory_utilization_percent")
_MEMORY_FIELDS = ("memory_total_bytes", "memory_used_bytes", "memory_free_bytes", "memory_reserved_bytes")

_NO_DRIVER = frozenset({pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED})
# Errors that no single GPU causes: NVML itself has to be started again.
_DRIVER_GONE = _NO_DRIVER | {pynvml.NVML_ERROR_UNINITIALIZED, pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH}
_GPU_GONE = {
    pynvml.NVML_ERROR_GPU_IS_LOST: GpuState.LOST,
    pynvml.NVML_ERROR_GPU_NOT_FOUND: GpuState.LOST,
    pynvml.NVML_ERROR_RESET_REQUIRED: GpuState.RESET_REQUIRED,
}
_STATUS = {
    pynvml.NVML_ERROR_NOT_SUPPORTED: ReadingStatus.NOT_SUPPORTED,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: ReadingStatus.NOT_SUPPORTED,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: ReadingStatus.NOT_SUPPORTED,
    pynvml.NVML_ERROR_DEPRECATED: ReadingStatus.NOT_SUPPORTED,
    pynvml.NVML_ERROR_NO_PERMISSION: ReadingStatus.NO_PERMISSION,
    pynvml.NVML_ERROR_TIMEOUT: ReadingStatus.TIMEOUT,
    pynvml.NVML_ERROR_GPU_IS_LOST: ReadingStatus.LOST,
    pynvml.NVML_ERROR_GPU_NOT_FOUND: ReadingStatus.LOST,
}

_Processes = list[pynvml.nvmlFriendlyObject]
_ProcessCall = Callable[[pynvml.c_nvmlDevice_t], _Processes]
_COMPUTE: tuple[_ProcessCall, _ProcessCall] = (
    pynvml.nvmlDeviceGetComputeRunningProcesses_v3,
    pynvml.nvmlDeviceGetComputeRunningProcesses_v2,
)
_GRAPHICS: tuple[_ProcessCall, _ProcessCall] = (
    pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3,
    pynvml.nvmlDeviceGetGraphicsRunningProcesses_v2,
)


@dataclass(slots=True)
class _Device:
    """What is known of a GPU between ticks."""

    handle: pynvml.c_nvmlDevice_t
    unsupported: Unsupported = field(default_factory=Unsupported)
    limit: Kept[float] | None = None
    processes: Kept[tuple[GpuProcess, ...]] | None = None


class NvmlSource:
    """The GPUs of this host's NVIDIA driver.

    One owner per process: a driver that was reloaded can be read again only after everybody in the process has shut
    NVML down. `now` gives seconds of any clock that never goes back.
    """

    simulated = False

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._names = ProcessNames()
        self._devices: dict[str, _Device] = {}
        self._initialised = False

    def open(self) -> Inventory:
        """Start NVML and list its GPUs. A GPU that cannot be identified is named in the problem.

        Raises:
            GpuSourceError: NVML does not start.
        """
        try:
            pynvml.nvmlInit()
            self._initialised = True
            version = pynvml.nvmlSystemGetDriverVersion()
            found = [self._identify(index) for index in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:
            raise _source_error(error) from error
        problems = [item for item in found if isinstance(item, str)] or ([] if found else ["no GPU found"])
        return Inventory(
            gpus=[item for item in found if isinstance(item, GpuIdentity)],
            driver_version=version,
            problem=f"NVML: {'; '.join(problems)}" if problems else "",
        )

    def read(self, uuid: str) -> GpuSample:
        """Read one GPU of the last inventory.

        Raises:
            GpuSourceError: NVML has to be started again.
        """
        device = self._devices[uuid]
        asking = Asking(device.unsupported, self._now(), pynvml.NVMLError, _explain)
        reading = _Tick(device, asking, self._names).read()
        silence = asking.silence()
        if silence is not None:
            reading = GpuReading.nothing(silence.status, silence.detail)
        return GpuSample(asking.state(), reading)

    def close(self) -> None:
        """Shut NVML down. A failure is ignored: there is nobody left who could do better."""
        self._devices.clear()
        if not self._initialised:
            return
        self._initialised = False
        try:
            pynvml.nvmlShutdown()
        except pynvml.NVMLError:
            return

    def _identify(self, index: int) -> GpuIdentity | str:
        """The GPU at an index, or what keeps it from being identified."""
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            identity = GpuIdentity(
                uuid=pynvml.nvmlDeviceGetUUID(handle),
                index=index,
                model=pynvml.nvmlDeviceGetName(handle),
                pci_bus_id=pynvml.nvmlDeviceGetPciInfo(handle).busId,
            )
        except pynvml.NVMLError as error:
            if error.value in _DRIVER_GONE:
                raise
            return f"GPU {index}: {error}"
        self._devices[identity.uuid] = _Device(handle)
        return identity


class _Tick:
    """One reading of one GPU."""

    def __init__(self, device: _Device, asking: Asking[pynvml.NVMLError], names: ProcessNames) -> None:
        self._device = device
        self._handle = device.handle
        self._asking = asking
        self._names = names

    def read(self) -> GpuReading:
        """Ask for everything that is due."""
        utilization, memory_utilization = self._utilization()
        total, used, free, reserved = self._memory()
        return GpuReading(
            utilization_percent=utilization,
            memory_utilization_percent=memory_utilization,
            memory_total_bytes=total,
            memory_used_bytes=used,
            memory_free_bytes=free,
            memory_reserved_bytes=reserved,
            temperature_celsius=self._temperature(),
            power_watts=self._power(),
            power_limit_watts=self._limit(),
            sm_clock_mhz=self._clock("sm_clock_mhz", pynvml.NVML_CLOCK_SM),
            memory_clock_mhz=self._clock("memory_clock_mhz", pynvml.NVML_CLOCK_MEM),
            performance_state=self._performance_state(),
            processes=self._processes(),
            absent=self._asking.absent,
        )

    def _utilization(self) -> tuple[float | None, float | None]:
        """Of the GPU, and of its memory's bandwidth."""
        found = self._asking.attempt(
            "utilization", partial(pynvml.nvmlDeviceGetUtilizationRates, self._handle)
        )
        if isinstance(found, Failure):
            self._asking.note(_UTILIZATION_FIELDS, found)
            return None, None
        gpu = self._asking.within(_UTILIZATION_FIELDS[0], found.gpu, high=100.0)
        return gpu, self._asking.within(_UTILIZATION_FIELDS[1], found.memory, high=100.0)

    def _memory(self) -> tuple[int | None, int | None, int | None, int | None]:
        """Total, used, free and reserved."""
        found = self._asking.attempt("memory v2", partial(_memory_v2, self._handle))
        if not isinstance(found, Failure):
            return self._plausible(found.total, found.used, found.free, found.reserved)
        if found.status is not ReadingStatus.NOT_SUPPORTED:
            self._asking.note(_MEMORY_FIELDS, found)
            return None, None, None, None
        older = self._asking.attempt("memory v1", partial(_memory_v1, self._handle))
        if isinstance(older, Failure):
            self._asking.note(_MEMORY_FIELDS, older)
            return None, None, None, None
        self._asking.note(_MEMORY_FIELDS[-1:], found)
        return self._plausible(older.total, older.used, older.free, None)

    def _plausible(
        self, total: int, used: int, free: int, reserved: int | None
    ) -> tuple[int | None, int | None, int | None, int | None]:
        """The figures, unless one is larger than the memory."""
        if total > 0 and max(used, free, reserved or 0) <= total:
            return total, used, free, reserved
        detail = f"the driver said {free} free and {used} used of {total}"
        self._asking.note(_MEMORY_FIELDS, Failure(ReadingStatus.ERROR, detail))
        return None, None, None, None

    def _temperature(self) -> float | None:
        call = partial(pynvml.nvmlDeviceGetTemperature, self._handle, pynvml.NVML_TEMPERATURE_GPU)
        return self._asking.number("temperature_celsius", call, high=_HIGHEST_CELSIUS)

    def _power(self) -> float | None:
        call = partial(pynvml.nvmlDeviceGetPowerUsage, self._handle)
        return self._asking.number("power_watts", call, scale=_MILLI, high=_HIGHEST_WATTS)

    def _limit(self) -> float | None:
        call = partial(pynvml.nvmlDeviceGetEnforcedPowerLimit, self._handle)
        self._device.limit = self._asking.kept(
            self._device.limit,
            LIMIT_EVERY_SECONDS,
            lambda: self._asking.number("power_limit_watts", call, scale=_MILLI, high=_HIGHEST_WATTS),
        )
        return self._device.limit.value

    def _clock(self, name: str, clock: int) -> float | None:
        call = partial(pynvml.nvmlDeviceGetClockInfo, self._handle, clock)
        return self._asking.number(name, call, high=_HIGHEST_MHZ)

    def _performance_state(self) -> int | None:
        found = self._asking.attempt(
            "performance state", partial(pynvml.nvmlDeviceGetPerformanceState, self._handle)
        )
        if not isinstance(found, Failure) and found > _HIGHEST_PERFORMANCE_STATE:
            found = Failure(ReadingStatus.NOT_SUPPORTED, "the driver does not know it")
        if isinstance(found, Failure):
            self._asking.note(("performance_state",), found)
            return None
        return found

    def _processes(self) -> tuple[GpuProcess, ...] | None:
        self._device.processes = self._asking.kept(
            self._device.processes, PROCESSES_EVERY_SECONDS, self._ask_processes
        )
        return self._device.processes.value

    def _ask_processes(self) -> tuple[GpuProcess, ...] | None:
        """Those that compute and those that draw; one kind alone where the GPU does not list the other."""
        kinds = [self._list("compute", *_COMPUTE), self._list("graphics", *_GRAPHICS)]
        failures = [found for found in kinds if isinstance(found, Failure)]
        serious = [failure for failure in failures if failure.status is not ReadingStatus.NOT_SUPPORTED]
        if serious or len(failures) == len(kinds):
            self._asking.note(("processes",), (serious or failures)[0])
            return None
        lists = [found for found in kinds if not isinstance(found, Failure)]
        return self._names.merge((process.pid, process.usedGpuMemory) for found in lists for process in found)

    def _list(self, kind: str, newer: _ProcessCall, older: _ProcessCall) -> _Processes | Failure:
        """By the v3 call; by the v2 call where v3 is missing, or its records have another driver's layout."""
        found = self._asking.attempt(f"{kind} v3", lambda: self._believed(newer))
        if isinstance(found, Failure) and found.status is ReadingStatus.NOT_SUPPORTED:
            return self._asking.attempt(f"{kind} v2", lambda: self._believed(older))
        return found

    def _believed(self, call: _ProcessCall) -> _Processes | Failure:
        found = call(self._handle)
        if self._names.believable(process.pid for process in found):
            return found
        return Failure(ReadingStatus.NOT_SUPPORTED, "the driver gives impossible process ids")


def _memory_v1(handle: pynvml.c_nvmlDevice_t) -> pynvml.c_nvmlMemory_t:
    return pynvml.nvmlDeviceGetMemoryInfo(handle)


def _memory_v2(handle: pynvml.c_nvmlDevice_t) -> pynvml.c_nvmlMemory_v2_t:
    return pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2)


def _explain(error: pynvml.NVMLError) -> Failure:
    """What an error says about the GPU that was asked.

    Raises:
        GpuSourceError: it says that NVML itself is gone.
    """
    if error.value in _DRIVER_GONE:
        raise _source_error(error) from error
    status = _STATUS.get(error.value, ReadingStatus.ERROR)
    return Failure(status, str(error), _GPU_GONE.get(error.value))


def _source_error(error: pynvml.NVMLError) -> GpuSourceError:
    return GpuSourceError(f"NVML: {error}", no_driver=error.value in _NO_DRIVER)
