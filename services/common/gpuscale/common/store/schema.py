"""Tables that work in SQLite and PostgreSQL alike: column types, migrations, and statements that are compiled once.

Migrations are alembic revisions: `versions/*.py` in a package, each named by the version that it leads to. Alembic is
imported only when there is something to migrate. A revision runs in the transaction of the store and speaks to the database
through `alembic.op`; the store keeps the version (docs/adr/0009).
"""

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.resources import as_file, files
from operator import itemgetter
from typing import Self, TypeAlias

from sqlalchemy import BigInteger, Boolean, Connection, Dialect, Integer, Table, TypeDecorator
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql.compiler import Compiled, SQLCompiler
from sqlalchemy.sql.elements import ClauseElement
from sqlalchemy.types import TypeEngine

from gpuscale.common.errors import AbortedError


class Whole(TypeDecorator[int]):
    """A whole number of 64 bits. SQLite's INTEGER has as many; PostgreSQL's has 32, so it is a BIGINT there."""

    impl = Integer
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[int]:
        """The type in a database."""
        return dialect.type_descriptor(BigInteger() if dialect.name == "postgresql" else Integer())


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


Migration: TypeAlias = Callable[[Connection], None]
Migrations: TypeAlias = Mapping[int, Migration]
"""What takes a database from one schema version to the next, by the version that it starts from."""

_Values = Callable[[Mapping[str, object]], Sequence[object]]
"""Takes the parameters of a statement out of a row, in their order."""


class Prepared:
    """A Core statement for either database, compiled when it is first run there.

    Rows are mappings from the names of its parameters to values as SQLite's driver takes them: JSON as text, truth as 0
    and 1.
    """

    def __init__(self, statement: ClauseElement) -> None:
        self._build: Callable[[str], ClauseElement] = lambda _dialect: statement
        self._sqlite: tuple[str, _Values] | None = None
        self._postgresql = ""
        self._truths: tuple[str, ...] = ()

    @classmethod
    def replacing(cls, table: Table) -> Self:
        """A row of the table, in place of the one with its key if there is one."""
        prepared = cls(table)
        prepared._build = lambda dialect: _upsert(table, dialect)
        return prepared

    def run(self, connection: Connection, rows: Sequence[Mapping[str, object]]) -> int:
        """Execute it once for each row, inside the transaction that is open; returns how many rows that changed.

        Raises:
            AbortedError: STATE_CONFLICT, the state refuses one of them (a key that exists, a trigger).
        """
        driver = connection.connection.driver_connection
        if isinstance(driver, sqlite3.Connection):
            return self._run_sqlite(driver, rows)
        return self._run_postgresql(connection, rows)

    def first(self, connection: Connection, row: Mapping[str, object]) -> Sequence[object] | None:
        """Execute a query and return its first row, inside the transaction that is open; None where it finds nothing."""
        driver = connection.connection.driver_connection
        if isinstance(driver, sqlite3.Connection):
            text, values = self._of_sqlite()
            found: Sequence[object] | None = driver.execute(text, values(row)).fetchone()
            return found
        from gpuscale.common.store.postgres import raw

        with raw(connection).cursor() as cursor:
            return cursor.execute(self._of_postgresql(connection).encode(), row).fetchone()

    def _of_sqlite(self) -> "tuple[str, _Values]":
        if self._sqlite is None:
            compiled = self._build("sqlite").compile(dialect=sqlite.dialect(paramstyle="qmark"))
            self._sqlite = str(compiled), _in_order(compiled)
        return self._sqlite

    def _of_postgresql(self, connection: Connection) -> str:
        if not self._postgresql:
            compiled = self._build("postgresql").compile(dialect=connection.dialect)
            self._truths = _truths(compiled)
            self._postgresql = str(compiled)
        return self._postgresql

    def _run_sqlite(self, driver: sqlite3.Connection, rows: Sequence[Mapping[str, object]]) -> int:
        text, values = self._of_sqlite()
        try:  # the driver would look up each parameter of each row by its name
            return driver.executemany(text, map(values, rows)).rowcount
        except sqlite3.IntegrityError as error:
            raise _refusal(error) from error

    def _run_postgresql(self, connection: Connection, rows: Sequence[Mapping[str, object]]) -> int:
        from gpuscale.common.store.postgres import IntegrityError, raw  # its driver is an extra

        text = self._of_postgresql(connection)
        truths = self._truths
        given = [{**row, **{name: bool(row[name]) for name in truths}} for row in rows] if truths else rows
        try:
            with raw(connection).cursor() as cursor:
                cursor.executemany(text.encode(), given)
                return cursor.rowcount
        except IntegrityError as error:
            raise _refusal(error) from error


def _in_order(compiled: Compiled) -> _Values:
    """Takes the parameters of a row, each as often as the statement has its name."""
    names = (compiled.positiontup or ()) if isinstance(compiled, SQLCompiler) else ()
    if len(names) > 1:
        return itemgetter(*names)
    return lambda row: [row[name] for name in names]  # of one name, an itemgetter takes the value alone


def _truths(compiled: Compiled) -> tuple[str, ...]:
    """Names of the parameters that are true or false."""
    if not isinstance(compiled, SQLCompiler):
        return ()
    return tuple(name for bind, name in compiled.bind_names.items() if isinstance(bind.type, Boolean))


def _upsert(table: Table, dialect: str) -> ClauseElement:
    keys = [column.name for column in table.primary_key]
    others = [column.name for column in table.columns if column.name not in keys]
    if dialect == "sqlite":
        into_sqlite = sqlite.insert(table)
        return into_sqlite.on_conflict_do_update(
            index_elements=keys, set_={name: into_sqlite.excluded[name] for name in others}
        )
    into = postgresql.insert(table)
    return into.on_conflict_do_update(
        index_elements=keys, set_={name: into.excluded[name] for name in others}
    )


def _refusal(error: Exception) -> AbortedError:
    first = str(error).partition("\n")[0]
    return AbortedError(f"the state refuses the change: {first}", reason="STATE_CONFLICT")
