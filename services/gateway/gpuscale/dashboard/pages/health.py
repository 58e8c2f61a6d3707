"""Health: what is wrong with which GPU or node, and what to do about it."""

from datetime import UTC, datetime

from gpuscale.dashboard import rows
from gpuscale.dashboard.frame import Site, Tiles, live, page
from gpuscale.dashboard.tables import Table


def build(site: Site) -> None:
    """Make the page."""
    with page(site, "Health"):
        tiles = Tiles(*rows.SEVERITIES)
        table = Table(rows.HEALTH, key="name", empty="nothing is wrong with any GPU or node")

    def draw() -> None:
        shown = rows.health_rows(site.facts.events.values(), datetime.now(UTC))
        table.show(shown)
        tiles.show(**{word: str(sum(row["severity"] == word for row in shown)) for word in rows.SEVERITIES})

    live(site.facts, draw)
