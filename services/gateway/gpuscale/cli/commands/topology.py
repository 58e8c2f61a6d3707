"""`gpuscalectl topology`: how close the GPUs and network cards of a node are to each other."""

from itertools import combinations
from typing import NamedTuple

from gpuscale.api.types import v1 as types_api
from gpuscale.cli.console import lookup
from gpuscale.cli.console.cells import text
from gpuscale.cli.console.command import Session, command, one_name
from gpuscale.cli.console.output import ABSENT
from gpuscale.cli.console.terminal import terminal_width, write_lines
from gpuscale.common.topology import Nearness, PciPlace, nearness

LEGEND = (
    "NV# = so many NVLinks; over PCIe, nearest first:",
    "PIX = at most one bridge, PXB = several bridges, PHB = the host bridge (CPU),",
    "NODE = host bridges of one NUMA node, SYS = the link between NUMA nodes,",
    f"{ABSENT} = not known",
)


class TopologyDevice(NamedTuple):
    """A row of the matrix: a GPU with its UUID and its NVLinks by UUID, or a network card."""

    name: str
    place: PciPlace
    uuid: str
    links: dict[str, int]


@command("topology host-1")
@one_name("nodes")
def topology(session: Session, name: str) -> None:
    """Show how close the GPUs and network cards of a node are to each other, like `nvidia-smi topo -m`."""
    with session.connect() as client:
        [node] = lookup.nodes(client, [name])
    snapshot = node.snapshot
    found = [
        TopologyDevice(
            f"GPU{gpu.index}", _place(gpu), gpu.uuid, {peer.uuid: peer.link_count for peer in gpu.nvlinks}
        )
        for gpu in snapshot.gpus
        if not gpu.parent_uuid  # no MIG instances
    ]
    found += [TopologyDevice(text(one.name), _place(one), "", {}) for one in snapshot.host.network_adapters]
    if not session.output.human:
        devices = [
            {"name": one.name, "uuid": one.uuid, "pciPath": one.place.path, "numaNode": one.place.numa_node}
            for one in found
        ]
        links = [
            {"from": one.name, "to": other.name, "by": _between(one, other)}
            for one, other in combinations(found, 2)
        ]
        session.output.write_data({"node": node.name, "devices": devices, "links": links})
        return
    # A row per device; in a narrow terminal, in several blocks of columns.
    names = _column("", [one.name for one in found])
    numa = _column(
        "NUMA", [ABSENT if one.place.numa_node is None else str(one.place.numa_node) for one in found]
    )
    others = [_column(other.name, [_between(one, other) for one in found]) for other in found]
    widest = max(len(column[0]) for column in others)
    room = (terminal_width() or 1 << 16) - len(names[0]) - len(numa[0])
    most = max(1, room // widest)
    lines: list[str] = []
    for start in range(0, len(others), most):
        block = [names, *others[start : start + most], numa]
        lines += [*([""] if lines else []), *("".join(row).rstrip() for row in zip(*block, strict=True))]
    write_lines([*lines, "", *LEGEND])


def _column(heading: str, cells: list[str]) -> list[str]:
    """A column with its heading, padded to one width."""
    width = max(map(len, (heading, *cells)))
    return [f"{cell:<{width}} " for cell in (heading, *cells)]


def _place(device: types_api.Gpu | types_api.NetworkAdapter) -> PciPlace:
    return PciPlace(device.pci_path, device.numa_node if device.HasField("numa_node") else None)


def _between(one: TopologyDevice, other: TopologyDevice) -> str:
    """`X` for a device and itself, `NV4` for four NVLinks, else the kind of PCIe path; `-` if unknown."""
    if one is other:
        return "X"
    if links := max(one.links.get(other.uuid, 0), other.links.get(one.uuid, 0)):
        return f"NV{links}"
    near = nearness(one.place, other.place)
    return ABSENT if near is None else Nearness(near).name
