"""What leads to each version of the autoscaler's schema (docs/adr/0009). The store makes tables that are missing by itself."""

from alembic.operations import Operations
from sqlalchemy import Column, Float, String


def to_10(op: Operations) -> None:
    """An index of decisions by their times, which may go back where those of ids go on."""
    op.create_index("decision_by_time", "decisionrow", ["create_time", "id"])


def to_11(op: Operations) -> None:
    """Why a replica ended, and when an endpoint was deleted."""
    op.add_column("endpointrow", Column("delete_time", Float))
    op.add_column("replicarow", Column("end_reason", String, nullable=False, server_default=""))


def to_12(op: Operations) -> None:
    """Tables more: backtests and their reports."""
