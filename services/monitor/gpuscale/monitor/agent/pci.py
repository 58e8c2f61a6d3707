"""NVIDIA GPUs and network adapters on this host's PCI bus, from /sys, with or without a driver."""

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gpuscale.common.topology import PciPlace
from gpuscale.monitor.model.readings import NetworkAdapter

_ROOT = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_NVIDIA = "0x10de"
_DISPLAY = "0x03"  # class codes 0x0300 (VGA) and 0x0302 (3D controller)
_GIVEN_AWAY = "vfio-pci"
"""The kernel driver of devices given to virtual machines; names of variants end in it (nvgrace_gpu_vfio_pci)."""
_SHORT = len("0000:00:00.0")


def find_gpus(devices: Path = Path("/sys/bus/pci/devices")) -> list[Path]:
    """The /sys folders of NVIDIA's display controllers; none if unknown."""
    found: list[Path] = []
    with suppress(OSError):
        for device in devices.iterdir():
            with suppress(OSError):
                vendor = (device / "vendor").read_text(encoding="ascii").strip()
                if vendor == _NVIDIA and (device / "class").read_text(encoding="ascii").startswith(_DISPLAY):
                    found.append(device)
    return found


def pci_place(device: Path) -> PciPlace:
    """The place of a /sys device in the PCIe tree; its path is empty if unknown."""
    parts = device.resolve().parts
    root = next((number for number, part in enumerate(parts) if _ROOT.fullmatch(part)), len(parts))
    numa_node = -1  # the kernel's value on a host without NUMA
    with suppress(OSError, ValueError):
        numa_node = int((device / "numa_node").read_text(encoding="ascii"))
    return PciPlace("/".join(parts[root:]), numa_node if numa_node >= 0 else None)


def find_adapters(sys: Path) -> tuple[NetworkAdapter, ...]:
    """InfiniBand devices and network cards on PCIe, by name; one that is both counts as InfiniBand."""
    found: dict[str, NetworkAdapter] = {}
    for kind in ("infiniband", "net"):
        with suppress(OSError):
            for entry in sorted((sys / "class" / kind).iterdir()):
                place = pci_place(entry / "device")
                if place.path:
                    found.setdefault(place.path, NetworkAdapter(entry.name, place))
    return tuple(sorted(found.values()))


def pci_address(text: str) -> str:
    """A PCI address in the kernel's form: NVML's has a longer domain and upper-case digits."""
    return text.lower()[-_SHORT:]


class Bus:
    """The GPUs on the bus, by address; `given_away` are those of virtual machines at the last `look`."""

    def __init__(self, devices: Sequence[Path]) -> None:
        self._devices = {pci_address(device.name): device for device in devices}
        self.gpus = frozenset(self._devices)
        self.given_away: frozenset[str] = frozenset()

    def look(self) -> None:
        """Update `given_away`."""
        given_away: set[str] = set()
        for address, device in self._devices.items():
            with suppress(OSError):
                driver = (device / "driver").readlink().name
                if driver.replace("_", "-").endswith(_GIVEN_AWAY):
                    given_away.add(address)
        self.given_away = frozenset(given_away)
