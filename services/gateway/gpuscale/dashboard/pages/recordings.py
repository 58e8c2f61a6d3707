"""Recordings: which there are."""

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.dashboard import words
from gpuscale.dashboard.frame import Site, live, page
from gpuscale.dashboard.rows import Row
from gpuscale.dashboard.tables import Table

_COLUMNS = {
    "name": "recording",
    "state": "state",
    "start": "started (UTC)",
    "duration": "duration",
    "samples": "samples",
    "gpus": "GPUs",
}


def build(site: Site) -> None:
    """Make the page of all recordings."""
    with page(site, "Recordings"):
        table = Table(
            _COLUMNS, key="name", links=("name",), empty="nothing was recorded: gpuscalectl record -- COMMAND"
        )
    live(site.facts, lambda: table.show([row_of(one) for one in site.facts.recordings]))


def row_of(one: monitor_api.Recording) -> Row:
    """What the table shows of a recording."""
    name = one.name.removeprefix("recordings/")
    return {
        "name": name,
        "name_to": f"/recordings/{name}",
        "state": words.word(one, "state"),
        "start": words.clock(one.start_time),
        "duration": words.length(one.duration),
        "samples": one.sample_count,
        "gpus": len(one.gpus),
    }
