"""How close two devices of a host are, by the PCIe bridges between them. Pure.

The terms are those of `nvidia-smi topo -m`.
"""

from enum import IntEnum
from itertools import takewhile
from typing import NamedTuple


class Nearness(IntEnum):
    """The connection between two devices; a higher number is nearer."""

    SYS = 0
    """Across NUMA nodes."""
    NODE = 1
    """Across host bridges of one NUMA node."""
    PHB = 2
    """Through one host bridge, typically the CPU."""
    PXB = 3
    """Through several PCIe bridges, no host bridge."""
    PIX = 4
    """Through at most one PCIe bridge."""


class PciPlace(NamedTuple):
    """Location of a device: host bridge, bridges and device joined by `/`, and its NUMA node."""

    path: str
    numa_node: int | None = None


NOWHERE = PciPlace("")
"""A device with an unknown path."""


def nearness(one: PciPlace, other: PciPlace) -> Nearness | None:
    """How close two devices are; None if a path is unknown."""
    if not one.path or not other.path:
        return None
    parts = one.path.split("/"), other.path.split("/")
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*parts, strict=False)))
    if common == 0:
        same = one.numa_node is not None and one.numa_node == other.numa_node
        return Nearness.NODE if same else Nearness.SYS
    if common == 1:
        return Nearness.PHB
    # Below the last shared bridge: a switch port, and the device.
    return Nearness.PIX if max(map(len, parts)) - common <= 2 else Nearness.PXB
