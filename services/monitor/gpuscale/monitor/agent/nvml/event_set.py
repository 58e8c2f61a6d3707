"""Events of the driver: XIDs and ECC errors, of all GPUs in one set."""

import ctypes
import time
from collections.abc import Iterable

import pynvml

from gpuscale.monitor.agent.nvml.reading import Device
from gpuscale.monitor.model.readings import DriverEvent, GpuEventKind

_KINDS = {
    pynvml.nvmlEventTypeXidCriticalError: GpuEventKind.XID,
    pynvml.nvmlEventTypeSingleBitEccError: GpuEventKind.ECC_CORRECTED,
    pynvml.nvmlEventTypeDoubleBitEccError: GpuEventKind.ECC_UNCORRECTED,
}


class EventSet:
    """The event set of one session of NVML; ends with the session, and is to be freed before."""

    def __init__(self, devices: Iterable[Device]) -> None:
        """Register every whole GPU.

        Raises:
            NVMLError: the driver has no event sets.
        """
        self._set = pynvml.nvmlEventSetCreate()
        self._uuids: dict[int | None, str] = {}
        for device in devices:
            if not device.identity.parent_uuid and self._register(device.handle):
                self._uuids[_address(device.handle)] = device.identity.uuid

    def __bool__(self) -> bool:
        """Whether any GPU has events."""
        return bool(self._uuids)

    def wait(self, timeout: float) -> DriverEvent | None:
        """The next event; None where there was none in time, or none of a known kind."""
        try:
            found = pynvml.nvmlEventSetWait_v2(self._set, int(timeout * 1000))
        except pynvml.NVMLError as error:
            if error.value != pynvml.NVML_ERROR_TIMEOUT:
                time.sleep(timeout)  # it answers at once: without a pause this would be asked without end
            return None
        kind, uuid = _KINDS.get(found.eventType), self._uuids.get(_address(found.device))
        if kind is None or uuid is None:
            return None
        return DriverEvent(uuid, kind, found.eventData if kind is GpuEventKind.XID else None)

    def free(self) -> None:
        """Give the set back. A failure is ignored: the session ends next."""
        try:
            pynvml.nvmlEventSetFree(self._set)
        except pynvml.NVMLError:
            return

    def _register(self, handle: pynvml.c_nvmlDevice_t) -> bool:
        """Whether the GPU has any of the events."""
        try:
            offered = pynvml.nvmlDeviceGetSupportedEventTypes(handle)
            wanted = sum(kind for kind in _KINDS if offered & kind)
            if wanted:
                pynvml.nvmlDeviceRegisterEvents(handle, wanted, self._set)
        except pynvml.NVMLError:
            return False
        return wanted != 0


def _address(handle: pynvml.c_nvmlDevice_t) -> int | None:
    """What a handle points to, by which handles can be compared."""
    return ctypes.cast(handle, ctypes.c_void_p).value
