"""Migrations written as alembic revisions: `versions/*.py` in a package, each named by the version that it leads to.

Alembic is imported only when there is something to migrate: a start costs nothing for it. A revision runs in the
transaction of the store, on SQLite and PostgreSQL alike, and speaks to the database through `alembic.op`; the store keeps
the version (docs/adr/0009).
"""

from collections.abc import Callable, Mapping
from functools import partial
from importlib.resources import as_file, files

from sqlalchemy import Connection


def revisions(package: str, *versions: int) -> Mapping[int, Callable[[Connection], None]]:
    """The migrations that lead to these versions, by the version before."""
    return {version - 1: partial(_run, package, version) for version in versions}


def _run(package: str, version: int, connection: Connection) -> None:
    """Apply one revision.

    Raises:
        CommandError: of alembic, there is no such revision.
    """
    from alembic.operations import Operations
    from alembic.runtime.migration import MigrationContext
    from alembic.script import ScriptDirectory

    with as_file(files(package)) as folder:
        script = ScriptDirectory(str(folder)).get_revision(str(version))
        with Operations.context(MigrationContext.configure(connection)):
            script.module.upgrade()
