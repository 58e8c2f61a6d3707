"""The GPUs of the driver and their MIG instances, found once per NVML session.

A MIG instance counts as a GPU, by the UUID that CUDA uses. Its parent stays listed, marked as divided, for the readings of the
board. As little as possible is asked, since one slow GPU delays all.
"""

import re
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pynvml

from gpuscale.monitor.agent.nvml.activity import Activity
from gpuscale.monitor.agent.nvml.queries import raise_if_driver_gone
from gpuscale.monitor.agent.nvml.tick import NvmlDevice
from gpuscale.monitor.agent.pci import Bus, find_gpus, pci_address, pci_place
from gpuscale.monitor.model.readings import GpuIdentity, MissingGpu

_MIG_PROFILE = re.compile(r"\bMIG (\S+)$")
_PROFILE_UNKNOWN = "unknown"

T = TypeVar("T")


class NvmlSurvey:
    """Finds the GPUs of a new NVML session: `devices` by UUID in the driver's order, and `missing` ones."""

    def __init__(self, sys: Path) -> None:
        self._sys = sys
        self.devices: dict[str, NvmlDevice] = {}
        self.missing: list[MissingGpu] = []

    def look(self) -> None:
        """Find the GPUs. NVMLError if the driver fails as a whole, GpuSourceError if NVML is gone."""
        whole: list[NvmlDevice] = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            address = ""
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                address = pynvml.nvmlDeviceGetPciInfo(handle).busId
                uuid, name = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
            except pynvml.NVMLError as error:
                raise_if_driver_gone(error)
                self.missing.append(MissingGpu(index, address, str(error)))
                continue
            place = pci_place(self._sys / "bus/pci/devices" / pci_address(address))
            divided = mig_enabled(handle) or False
            identity = GpuIdentity(
                uuid,
                index,
                name,
                address,
                divided=divided,
                place=place,
                serial=_answer(pynvml.nvmlDeviceGetSerial, handle) or "",
                vbios_version=_answer(pynvml.nvmlDeviceGetVbiosVersion, handle) or "",
            )
            whole.append(NvmlDevice(handle, identity, None if identity.divided else Activity(handle, None)))
        self._look_at_bus({device.identity.pci_bus_id for device in whole})
        by_address = {device.identity.pci_bus_id: device.identity.uuid for device in whole}
        for device in whole:
            device.by_address = by_address
            self.devices[device.identity.uuid] = device
            for part in mig_parts(device):
                self.devices[part.identity.uuid] = part

    def _look_at_bus(self, known: AbstractSet[str]) -> None:
        """Find GPUs that the driver does not list, and the addresses of those that did not answer, both in address order."""
        bus = Bus(find_gpus(self._sys / "bus/pci/devices"))
        bus.look()
        named = {pci_address(address) for address in (*known, *(lost.pci_bus_id for lost in self.missing))}
        others = sorted(bus.gpus - bus.given_away - named)
        for place, missing in enumerate(self.missing):
            if not missing.pci_bus_id and others:
                self.missing[place] = replace(missing, pci_bus_id=others.pop(0))
        after = len(known) + len(self.missing)
        self.missing.extend(
            MissingGpu(after + number, address, "the driver does not list it")
            for number, address in enumerate(others)
        )


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
            mig_profile=profile.group(1) if profile else _PROFILE_UNKNOWN,
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
    """The result of a call; None if it fails."""
    try:
        return call(handle)
    except pynvml.NVMLError as error:
        raise_if_driver_gone(error)
        return None
