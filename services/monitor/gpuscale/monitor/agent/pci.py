"""NVIDIA's GPUs on this host's PCI bus, as the kernel tells it, with a driver or without."""

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
"""The kernel's driver for devices that programs have for themselves, such as virtual machines; variants of it for one kind of
device end in the same way (nvgrace_gpu_vfio_pci). NVML does not list their GPUs."""
_SHORT = len("0000:00:00.0")


def find_gpus(devices: Path = Path("/sys/bus/pci/devices")) -> list[Path]:
    """The folders of NVIDIA's display controllers; none where the kernel does not tell."""
    found: list[Path] = []
    with suppress(OSError):
        for device in devices.iterdir():
            with suppress(OSError):
                vendor = (device / "vendor").read_text(encoding="ascii").strip()
                if vendor == _NVIDIA and (device / "class").read_text(encoding="ascii").startswith(_DISPLAY):
                    found.append(device)
    return found


def pci_place(device: Path) -> PciPlace:
    """Where a device of /sys hangs on PCIe; with an empty path where the kernel does not tell."""
    parts = device.resolve().parts
    root = next((number for number, part in enumerate(parts) if _ROOT.fullmatch(part)), len(parts))
    numa_node = -1  # as the kernel says on a host without such nodes
    with suppress(OSError, ValueError):
        numa_node = int((device / "numa_node").read_text(encoding="ascii"))
    return PciPlace("/".join(parts[root:]), numa_node if numa_node >= 0 else None)


def find_adapters(sys: Path) -> tuple[NetworkAdapter, ...]:
    """InfiniBand devices and network cards on PCIe, by name; a card that is both is there once, as InfiniBand."""
    found: dict[str, NetworkAdapter] = {}
    for kind in ("infiniband", "net"):
        with suppress(OSError):
            for entry in sorted((sys / "class" / kind).iterdir()):
                place = pci_place(entry / "device")
                if place.path:
                    found.setdefault(place.path, NetworkAdapter(entry.name, place))
    return tuple(sorted(found.values()))


def pci_address(text: str) -> str:
    """An address as the kernel writes it: NVML writes a longer domain, in capitals."""
    return text.lower()[-_SHORT:]


class Bus:
    """The GPUs that are or were on the bus, by address, and those `given_away`: as of the last look a program has them."""

    def __init__(self, devices: Sequence[Path]) -> None:
        self._devices = {pci_address(device.name): device for device in devices}
        self.gpus = frozenset(self._devices)
        self.given_away: frozenset[str] = frozenset()

    def look(self) -> None:
        """Update which GPUs are given away: that may change at any time."""
        given_away: set[str] = set()
        for address, device in self._devices.items():
            with suppress(OSError):
                driver = (device / "driver").readlink().name
                if driver.replace("_", "-").endswith(_GIVEN_AWAY):
                    given_away.add(address)
        self.given_away = frozenset(given_away)
