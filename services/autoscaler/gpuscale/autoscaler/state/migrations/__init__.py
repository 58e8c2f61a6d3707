"""Migrations of the autoscaler's state: a revision of alembic leads to each schema version (docs/adr/0009)."""
