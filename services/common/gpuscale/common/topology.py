"""How near two devices of a host are to each other: by the bridges that PCIe leads over between them. Pure.

The words are those of `nvidia-smi topo -m`.
"""

from enum import IntEnum
from itertools import takewhile
from typing import NamedTuple


class Nearness(IntEnum):
    """What leads from one device to the other; a higher number is nearer."""

    SYS = 0
    """The link between the NUMA nodes of the host."""
    NODE = 1
    """The link between the host bridges of one NUMA node."""
    PHB = 2
    """One host bridge, which is typically the CPU."""
    PXB = 3
    """Several PCIe bridges, and no host bridge."""
    PIX = 4
    """At most one PCIe bridge."""


class PciPlace(NamedTuple):
    """Where a device hangs: host bridge, bridges and device, with `/` between them, and the number of its NUMA node."""

    path: str
    numa_node: int | None = None


NOWHERE = PciPlace("")
"""Of a device whose path is not known."""


def nearness(one: PciPlace, other: PciPlace) -> Nearness | None:
    """How near two devices are; None where the path of one is not known."""
    if not one.path or not other.path:
        return None
    parts = one.path.split("/"), other.path.split("/")
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*parts, strict=False)))
    if common == 0:
        same = one.numa_node is not None and one.numa_node == other.numa_node
        return Nearness.NODE if same else Nearness.SYS
    if common == 1:
        return Nearness.PHB
    # Behind the last bridge that both share there is the port of a switch, and the device.
    return Nearness.PIX if max(map(len, parts)) - common <= 2 else Nearness.PXB
