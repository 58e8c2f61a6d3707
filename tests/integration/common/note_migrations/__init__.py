"""Migrations of the store of notes: revisions of alembic that suit either database."""
