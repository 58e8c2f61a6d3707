"""Which GPUs there are: whole ones, and the MIG instances of those that are divided.

Everything here is asked once, when NVML is started. A MIG instance is a GPU of its own, known by the UUID that CUDA
takes; the GPU that it is a part of stays in the list, for its board's readings, marked as divided. As little as possible
is asked: one GPU that answers slowly here delays all of them.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pynvml

from gpuscale.monitor.model.readings import GpuIdentity
from gpuscale.monitor.agent.nvml.errors import raise_if_driver_gone
from gpuscale.monitor.agent.nvml.reading import Device

_MIG_PROFILE = re.compile(r"\bMIG (\S+)$")
_PROFILE_UNKNOWN = "unknown"


class Survey:
    """Looks for the GPUs of the driver that was just started.

    Attributes:
        devices: what was found, by UUID, in the driver's order.
        problems: why some GPUs are not among them.
    """

    def __init__(self, sys: Path) -> None:
        self._sys = sys
        self.devices: dict[str, Device] = {}
        self.problems: list[str] = []

    def look(self) -> None:
        """Find the GPUs.

        Raises:
            NVMLError: of the driver as a whole.
            GpuSourceError: NVML is gone again.
        """
        whole = [
            device
            for index in range(pynvml.nvmlDeviceGetCount())
            if (device := self._whole(index)) is not None
        ]
        by_address = {device.identity.pci_bus_id: device.identity.uuid for device in whole}
        for device in whole:
            device.by_address = by_address
            self.devices[device.identity.uuid] = device
            for part in mig_parts(device):
                self.devices[part.identity.uuid] = part

    def _whole(self, index: int) -> Device | None:
        """The GPU at an index; None, and a problem noted, if it cannot be identified."""
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            address = pynvml.nvmlDeviceGetPciInfo(handle).busId
            identity = GpuIdentity(
                uuid=pynvml.nvmlDeviceGetUUID(handle),
                index=index,
                model=pynvml.nvmlDeviceGetName(handle),
                pci_bus_id=address,
                divided=_is_divided(handle),
                numa_node=_numa_node(self._sys, address),
            )
        except pynvml.NVMLError as error:
            raise_if_driver_gone(error)
            self.problems.append(f"GPU {index}: {error}")
            return None
        return Device(handle, identity)


def mig_parts(parent: Device) -> Iterator[Device]:
    """The MIG instances of a GPU; none of one that is not divided."""
    if not parent.identity.divided:
        return
    for place in range(_most_parts(parent.handle)):
        try:
            handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(parent.handle, place)
            uuid, name = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
        except pynvml.NVMLError as error:
            raise_if_driver_gone(error)
            continue  # the places of instances that were taken away stay empty
        profile = _MIG_PROFILE.search(name)
        yield Device(
            handle,
            replace(
                parent.identity,
                uuid=uuid,
                model=name,
                mig_profile=profile.group(1) if profile else _PROFILE_UNKNOWN,
                parent_uuid=parent.identity.uuid,
                divided=False,
                nvlinks=(),
                gpu_instance_id=_gpu_instance_id(handle),
            ),
        )


def _gpu_instance_id(handle: pynvml.c_nvmlDevice_t) -> int | None:
    try:
        return pynvml.nvmlDeviceGetGpuInstanceId(handle)
    except pynvml.NVMLError as error:
        raise_if_driver_gone(error)
        return None


def _is_divided(handle: pynvml.c_nvmlDevice_t) -> bool:
    try:
        return pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    except pynvml.NVMLError as error:
        raise_if_driver_gone(error)
        return False


def _most_parts(handle: pynvml.c_nvmlDevice_t) -> int:
    try:
        return pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except pynvml.NVMLError as error:
        raise_if_driver_gone(error)
        return 0


def _numa_node(sys: Path, address: str) -> int | None:
    """The kernel's word on it; -1 there means that the host has no such nodes."""
    short = address.lower()[-len("0000:00:00.0") :]
    try:
        node = int((sys / "bus/pci/devices" / short / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
