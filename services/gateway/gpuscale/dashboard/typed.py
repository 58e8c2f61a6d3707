"""What one would type about a row of `gpuscalectl top`: to be told why, to read its logs, to end it. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.common import names
from gpuscale.dashboard.rows import Row

Words: TypeAlias = tuple[str, ...]
"""Arguments of gpuscalectl; none where there is nothing to type."""


def why(table: str, row: Row, held: allocator_api.Reservation | None) -> Words:
    """What tells most of it; `held` is the reservation that the row is of, or that holds its GPU."""
    if table in {"endpoints", "decisions"}:
        return ("explain", table.removesuffix("s"), _short(str(row["name"])))
    if held is not None:
        return ("explain", "reservation", _short(held.name))
    if table == "health":
        node, _, uuid = str(row["where"]).partition(" ")
        return ("describe", "gpu", uuid) if uuid else ("describe", "node", node)
    if "gpu" not in row:  # of a reservation that ended meanwhile
        return ()
    name = str(row.get("uuid") or row["gpu"])
    return ("describe", "gpu" if "uuid" in row or "/" in name else "node", name)


def logs(table: str, row: Row, held: allocator_api.Reservation | None) -> Words:
    """What shows what the endpoint, replica or job has written, and goes on."""
    if table in {"endpoints", "decisions"}:
        return ("logs", _short(str(row["name"])).partition("/")[0], "--follow")
    if held is None or not (held.HasField("job") or names.match(names.REPLICA, held.holder)):
        return ()
    return (
        "logs",
        _short(held.name) if held.HasField("job") else names.short_holder(held.holder),
        "--follow",
    )


def end(held: allocator_api.Reservation) -> Words:
    """What stops its job, or gives its GPUs back."""
    return (*(("stop", "job") if held.HasField("job") else ("release",)), _short(held.name))


def of_row(
    table: str, row: Row, reservations: Iterable[allocator_api.Reservation]
) -> allocator_api.Reservation | None:
    """The reservation that a row is of; of a GPU, the first that holds it."""
    if table == "gpus":
        return next(
            (one for one in reservations if any(gpu.uuid == row.get("uuid") for gpu in one.gpus)), None
        )
    named = {"reservations": row.get("name"), "processes": row.get("reservation")}.get(table)
    return next((one for one in reservations if _short(one.name) == named), None)


def _short(name: str) -> str:
    """`jobs/d1` of endpoints/jobs/decisions/d1."""
    return "/".join(name.split("/")[1::2]) or name
