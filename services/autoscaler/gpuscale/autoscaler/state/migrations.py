"""Migrations to each version of the autoscaler's schema (docs/adr/0009). The store creates missing tables itself."""

from alembic.operations import Operations
from sqlalchemy import Boolean, Column, Float, LargeBinary, String, inspect, text


def _text(name: str) -> Column[str]:
    return Column(name, String, nullable=False, server_default="")


def to_2(op: Operations) -> None:
    """Watchers of patterns and of rates. Version 1 had single queues only, and only existed in SQLite."""
    for name in ("pattern", "rates"):
        op.add_column("watcherrow", Column(name, Boolean, nullable=False, server_default=text("0")))


def to_3(op: Operations) -> None:
    """A new table: the history of endpoints' queues."""


def to_4(op: Operations) -> None:
    """The token of a replica's GPUs. Earlier replicas have none: they were admitted when they started."""
    op.add_column("replicarow", _text("lease_token"))


def to_5(op: Operations) -> None:
    """Readings of queues that did not change for long. Version 2 had none: their table is still missing."""
    if inspect(op.get_bind()).has_table("readingrow"):
        op.add_column("readingrow", Column("since", Float))


def to_6(op: Operations) -> None:
    """Capability sets: wanted groups of each, and what the workers of a replica can do."""
    op.add_column("endpointrow", _text("sets"))
    op.add_column("replicarow", Column("worker_group", LargeBinary, nullable=False, server_default=""))


def to_7(op: Operations) -> None:
    """Whose quota the GPUs of an endpoint count against; before, the autoscaler's own."""
    op.add_column("endpointrow", _text("tenant"))


def to_8(op: Operations) -> None:
    """The creator of an endpoint; before, the reservations of its replicas were the autoscaler's."""
    op.add_column("endpointrow", _text("creator"))


def to_9(op: Operations) -> None:
    """Planned revocations of replicas' GPUs. The allocator sends them at the next connection."""
    op.add_column("replicarow", _text("revocation"))


def to_10(op: Operations) -> None:
    """An index of decisions by their times, which may go back while ids go on."""
    if inspect(op.get_bind()).has_table("decisionrow"):
        op.create_index("decision_by_time", "decisionrow", ["create_time", "id"])


def to_11(op: Operations) -> None:
    """Why a replica ended, and when an endpoint was deleted."""
    op.add_column("endpointrow", Column("delete_time", Float))
    op.add_column("replicarow", _text("end_reason"))


def to_12(op: Operations) -> None:
    """New tables: backtests and their reports."""
