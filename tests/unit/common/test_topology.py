"""How near devices are to each other, by their paths on PCIe."""

from itertools import combinations

import pytest

from gpuscale.common.topology import NOWHERE, Nearness, PciPlace, nearness

SWITCHED = "pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:00.0/0000:19:00.0"
"""A GPU behind a switch: host bridge, root port, upper and lower port of the switch, GPU."""


@pytest.mark.parametrize(
    ("other", "numa_node", "near"),
    [
        ("pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:01.0/0000:1a:00.0", 0, Nearness.PIX),
        ("pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:00.0/0000:19:00.1", 0, Nearness.PIX),
        ("pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:01.0/0000:1b:00.0/0000:1c:00.0", 0, Nearness.PXB),
        ("pci0000:16/0000:16:02.0/0000:20:00.0", 0, Nearness.PHB),
        ("pci0000:40/0000:40:01.0/0000:41:00.0", 0, Nearness.NODE),
        ("pci0000:80/0000:80:01.0/0000:81:00.0", 1, Nearness.SYS),
        ("pci0000:80/0000:80:01.0/0000:81:00.0", None, Nearness.SYS),
        ("", 0, None),
    ],
)
def test_two_devices_are_as_near_as_their_paths_have_in_common(
    other: str, numa_node: int | None, near: Nearness | None
) -> None:
    one = PciPlace(SWITCHED, 0)
    assert nearness(one, PciPlace(other, numa_node)) is near
    assert nearness(PciPlace(other, numa_node), one) is near


def test_nobody_knows_how_near_two_devices_are_that_are_nowhere() -> None:
    assert nearness(NOWHERE, NOWHERE) is None


def test_a_host_of_two_sockets_with_four_cards_each_on_two_switches() -> None:
    """As of an A100-PCIe server."""
    places = [
        PciPlace(f"pci0000:{bridge}0/0000:{bridge}0:01.0/0000:{bridge}1:00.0/port{card}/card{card}", socket)
        for socket in range(2)
        for bridge in (socket * 2, socket * 2 + 1)
        for card in range(2)
    ]
    found = [nearness(one, other) for one, other in combinations(places, 2)]
    counts = {near: found.count(near) for near in Nearness}
    assert counts == {Nearness.SYS: 16, Nearness.NODE: 8, Nearness.PHB: 0, Nearness.PXB: 0, Nearness.PIX: 4}
