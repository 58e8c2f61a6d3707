"""How many NVIDIA GPUs are on this host's PCI bus, as the kernel tells it, with a driver or without."""

from pathlib import Path

_NVIDIA = "0x10de"
_DISPLAY = "0x03"  # class codes 0x0300 (VGA) and 0x0302 (3D controller)


def count_gpus(devices: Path = Path("/sys/bus/pci/devices")) -> int:
    """The number of display controllers of NVIDIA; 0 where the kernel does not tell."""
    try:
        return sum(_is_gpu(device) for device in devices.iterdir())
    except OSError:
        return 0


def _is_gpu(device: Path) -> bool:
    try:
        vendor = (device / "vendor").read_text(encoding="ascii").strip()
        return vendor == _NVIDIA and (device / "class").read_text(encoding="ascii").startswith(_DISPLAY)
    except OSError:
        return False
