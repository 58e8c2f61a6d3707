"""The GPU source over NVML, with one session at a time, its GPUs, and its event set.

The GPUs of the driver and their MIG instances are found once per session. A MIG instance counts as a GPU, by the UUID that CUDA
uses. Its parent stays listed, marked as divided, for the readings of the board. As little as possible is asked, since one slow
GPU delays all.
"""

import ctypes
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pynvml

from gpuscale.monitor.agent.nvml.calls import Queries, raise_if_driver_gone, source_error
from gpuscale.monitor.agent.nvml.field_values import Activity
from gpuscale.monitor.agent.nvml.gpu_readings import FIRST_PARTS_SECONDS, SLOW_EVERY_SECONDS, NvmlDevice, Tick
from gpuscale.monitor.agent.pci import Bus, find_gpus, pci_address, pci_place
from gpuscale.monitor.agent.processes import ProcessNames
from gpuscale.monitor.model.readings import (
    DriverEvent,
    GpuIdentity,
    GpuReading,
    GpuSample,
    Inventory,
    MissingGpu,
)

_XID = pynvml.nvmlEventTypeXidCriticalError


class EventSet:
    """The XID errors of an NVML session; free it before the session ends."""

    def __init__(self, devices: Iterable[NvmlDevice]) -> None:
        """Register every whole GPU. NVMLError if the driver has no event sets."""
        self._set = pynvml.nvmlEventSetCreate()
        self._uuids: dict[int | None, str] = {}
        for device in devices:
            if device.identity.parent_uuid:
                continue
            with suppress(pynvml.NVMLError):
                if pynvml.nvmlDeviceGetSupportedEventTypes(device.handle) & _XID:
                    pynvml.nvmlDeviceRegisterEvents(device.handle, _XID, self._set)
                    self._uuids[_address(device.handle)] = device.identity.uuid

    def __bool__(self) -> bool:
        return bool(self._uuids)

    def wait(self, timeout: float) -> DriverEvent | None:
        """The next event; None on a timeout or for an unknown kind."""
        try:
            found = pynvml.nvmlEventSetWait_v2(self._set, int(timeout * 1000))
        except pynvml.NVMLError as error:
            if error.value != pynvml.NVML_ERROR_TIMEOUT:
                time.sleep(timeout)  # it fails at once: do not spin
            return None
        uuid = self._uuids.get(_address(found.device))
        return DriverEvent(uuid, found.eventData) if uuid is not None and found.eventType == _XID else None

    def free(self) -> None:
        """Free the set. A failure is ignored: the session ends next."""
        with suppress(pynvml.NVMLError):
            pynvml.nvmlEventSetFree(self._set)


def _address(handle: pynvml.c_nvmlDevice_t) -> int | None:
    """The address that a handle points to, which identifies it."""
    return ctypes.cast(handle, ctypes.c_void_p).value


class NvmlSource:
    """The GPUs of this host's NVIDIA driver. `now`: a monotonic clock, in seconds.

    Make one per process: after a driver reload, NVML works again only once every user in the process has shut it down.
    """

    simulated = False

    def __init__(self, now: Callable[[], float] = time.monotonic, *, sys: Path = Path("/sys")) -> None:
        self._now = now
        self._sys = sys
        self._names = ProcessNames(now)
        self._devices: dict[str, NvmlDevice] = {}
        self._events: EventSet | None = None
        self._initialised = False
        self.outdated = False  # whether MIG modes or instances have changed since `open`
        self._parts_until: dict[str, float] = {}

    def open(self) -> Inventory:
        """Start NVML and list its GPUs; `problem` names those that cannot be identified."""
        try:
            pynvml.nvmlInit()
            self._initialised = True
            version, cuda = pynvml.nvmlSystemGetDriverVersion(), 0
            with suppress(pynvml.NVMLError):
                cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
            devices, missing = find_devices(self._sys)
        except pynvml.NVMLError as error:
            raise source_error(error) from error
        self.outdated = False
        self._devices = devices
        with suppress(pynvml.NVMLError):
            self._events = EventSet(self._devices.values())
        problems = [
            f"GPU {gpu.index}{gpu.pci_bus_id and f' at {gpu.pci_bus_id}'}: {gpu.problem}" for gpu in missing
        ] or ([] if devices else ["no GPU found"])
        return Inventory(
            gpus=[device.identity for device in devices.values()],
            driver_version=version,
            cuda_version=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "",
            problem=f"NVML: {'; '.join(problems)}" if problems else "",
            has_events=bool(self._events),
            missing=tuple(missing),
        )

    def read(self, uuid: str) -> GpuSample:
        """Read a GPU of the last inventory. GpuSourceError if NVML must be restarted."""
        device = self._devices[uuid]
        queries = Queries(device.unsupported, self._now())
        reading = Tick(device, queries, self._names).read()
        silence = queries.silence()
        if silence is not None:
            reading = GpuReading.nothing(silence.status, silence.detail)
        elif not device.identity.parent_uuid:
            # Now and then, compare the MIG mode and instances of a GPU with the inventory, and ask again for what was
            # unsupported, as that may depend on the MIG mode.
            now = queries.now
            if now >= self._parts_until.setdefault(uuid, now + FIRST_PARTS_SECONDS):
                self._parts_until[uuid] = now + SLOW_EVERY_SECONDS
                divided = mig_enabled(device.handle)
                if divided is not None:
                    device.unsupported.clear()
                    known = {part for part, one in self._devices.items() if one.identity.parent_uuid == uuid}
                    if divided != device.identity.divided or known != {
                        part.identity.uuid for part in mig_parts(device)
                    }:
                        self.outdated = True
        return GpuSample(queries.state(), reading, device.links.ends, queries.calls, queries.refusals)

    def probe(self, uuid: str) -> None:
        """Ask for the performance state, a cheap call that reaches the GPU."""
        try:
            pynvml.nvmlDeviceGetPerformanceState(self._devices[uuid].handle)
        except pynvml.NVMLError as error:
            raise_if_driver_gone(error)

    def wait_event(self, timeout: float) -> DriverEvent | None:
        """Wait for an XID error of any GPU."""
        return self._events.wait(timeout) if self._events is not None else None

    def interrupt(self) -> bool:
        """Not supported: a thread that is stuck in the driver cannot be freed."""
        return False

    def close(self) -> None:
        """Shut NVML down, ignoring failures."""
        for device in self._devices.values():
            if device.activity is not None:
                device.activity.close()
        self._devices = {}
        self._parts_until = {}
        if self._events is not None:
            self._events.free()
            self._events = None
        if not self._initialised:
            return
        self._initialised = False
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


_MIG_PROFILE = re.compile(r"\bMIG (\S+)$")

T = TypeVar("T")


def find_devices(sys: Path) -> tuple[dict[str, NvmlDevice], list[MissingGpu]]:
    """The GPUs of a new NVML session, by UUID in the driver's order, and missing ones.

    NVMLError if the driver fails as a whole, GpuSourceError if NVML is gone.
    """
    whole, missing = list[NvmlDevice](), list[MissingGpu]()
    for index in range(pynvml.nvmlDeviceGetCount()):
        address = ""
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            address = pynvml.nvmlDeviceGetPciInfo(handle).busId
            uuid, name = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
        except pynvml.NVMLError as error:
            raise_if_driver_gone(error)
            missing.append(MissingGpu(index, address, str(error)))
            continue
        place = pci_place(sys / "bus/pci/devices" / pci_address(address))
        identity = GpuIdentity(
            uuid,
            index,
            name,
            address,
            divided=mig_enabled(handle) or False,
            place=place,
            serial=_answer(pynvml.nvmlDeviceGetSerial, handle) or "",
            vbios_version=_answer(pynvml.nvmlDeviceGetVbiosVersion, handle) or "",
        )
        whole.append(NvmlDevice(handle, identity, None if identity.divided else Activity(handle, None)))
    # GPUs that the driver does not list, and the addresses of those that did not answer, both in address order.
    bus = Bus(find_gpus(sys / "bus/pci/devices"))
    bus.look()
    known = {device.identity.pci_bus_id for device in whole}
    named = {pci_address(address) for address in (*known, *(lost.pci_bus_id for lost in missing))}
    others = sorted(bus.gpus - bus.given_away - named)
    for number, lost in enumerate(missing):
        if not lost.pci_bus_id and others:
            missing[number] = replace(lost, pci_bus_id=others.pop(0))
    after = len(known) + len(missing)
    missing.extend(
        MissingGpu(after + number, address, "the driver does not list it")
        for number, address in enumerate(others)
    )
    by_address = {device.identity.pci_bus_id: device.identity.uuid for device in whole}
    devices: dict[str, NvmlDevice] = {}
    for device in whole:
        device.by_address = by_address
        devices[device.identity.uuid] = device
        for part in mig_parts(device):
            devices[part.identity.uuid] = part
    return devices, missing


def mig_parts(parent: NvmlDevice) -> Iterator[NvmlDevice]:
    """The MIG instances of a GPU; none if it is not divided."""
    if not parent.identity.divided:
        return
    for place in range(_answer(pynvml.nvmlDeviceGetMaxMigDeviceCount, parent.handle) or 0):
        try:
            handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(parent.handle, place)
            uuid, name = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
        except pynvml.NVMLError as error:
            raise_if_driver_gone(error)
            continue  # a removed instance leaves an empty place
        profile = _MIG_PROFILE.search(name)
        instance = _answer(pynvml.nvmlDeviceGetGpuInstanceId, handle)
        identity = replace(
            parent.identity,
            uuid=uuid,
            model=name,
            mig_profile=profile.group(1) if profile else "unknown",
            parent_uuid=parent.identity.uuid,
            divided=False,
            nvlinks=(),
            gpu_instance_id=instance,
        )
        yield NvmlDevice(handle, identity, None if instance is None else Activity(parent.handle, instance))


def mig_enabled(handle: pynvml.c_nvmlDevice_t) -> bool | None:
    """Whether MIG mode is enabled; None if the GPU does not support or report it."""
    mode = _answer(pynvml.nvmlDeviceGetMigMode, handle)
    return None if mode is None else mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE


def _answer(call: Callable[[pynvml.c_nvmlDevice_t], T], handle: pynvml.c_nvmlDevice_t) -> T | None:
    try:
        return call(handle)
    except pynvml.NVMLError as error:
        raise_if_driver_gone(error)
        return None
