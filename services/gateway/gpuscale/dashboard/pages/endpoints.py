"""Endpoints: how many replicas each has and wants, and why, in one line."""

from gpuscale.dashboard import rows
from gpuscale.dashboard.frame import Site, live, page
from gpuscale.dashboard.tables import Table


def build(site: Site) -> None:
    """Make the page."""
    with page(site, "Endpoints"):
        table = Table(rows.ENDPOINTS, key="name", links=("name",), empty="there is no endpoint")
    live(site.facts, lambda: table.show([rows.endpoint_row(one) for one in site.facts.endpoints]))
