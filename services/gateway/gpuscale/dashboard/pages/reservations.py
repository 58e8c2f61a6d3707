"""Reservations: who holds what, for how long, and how much of it is used."""

from functools import partial

from gpuscale.dashboard import rows
from gpuscale.dashboard.acting import Hands
from gpuscale.dashboard.frame import ACT, Site, Table, Tiles, live, page


def build(site: Site) -> None:
    """Make the page."""
    with page(site, "Reservations"):
        tiles = Tiles("holding", "waiting", "GPUs reserved", "GPUs reserved and idle")
        hands = site.hands()
        columns = {**rows.RESERVATIONS, ACT: ""} if hands else rows.RESERVATIONS
        table = Table(columns, key="name", empty="nobody holds a GPU, and nobody waits for one")
        if hands is not None:
            table.add_button("release", partial(_release, site, hands))

    def draw() -> None:
        gpus = site.facts.gpus()
        by_uuid = {gpu.uuid: gpu for gpu in gpus}
        table.show([rows.reservation_row(one, by_uuid) for one in site.facts.reservations])
        tiles.show(**rows.reservation_figures(site.facts.reservations, gpus))

    live(site.facts, draw)


async def _release(site: Site, hands: Hands, name: str) -> None:
    for one in site.facts.reservations:
        if one.name == f"reservations/{name}":
            await hands.release(one)
