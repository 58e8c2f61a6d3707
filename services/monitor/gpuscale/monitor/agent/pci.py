"""NVIDIA's GPUs on this host's PCI bus, as the kernel tells it, with a driver or without."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

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
