"""What a store needs of the database below it; `sqlite_store` and `postgres_store` give it."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import LiteralString, Protocol, TypeAlias

from sqlalchemy import Connection

Migrations: TypeAlias = Mapping[int, Callable[[Connection], None]]
"""What takes a database from one schema version to the next, by the version that it starts from."""


class Driver(Protocol):
    """The connection of the database's driver, below SQLAlchemy's."""

    def execute(self, query: LiteralString, /) -> object:
        """Run a statement without parameters."""
        ...


class Backend(Protocol):
    """A database. `writer` and `reader` are entered each by the thread that then uses the connection."""

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What its driver raises, and SQLAlchemy for it."""
        ...

    def writer(self) -> AbstractContextManager[Connection]:
        """The connection that writes. Makes or migrates the tables first."""
        ...

    def reader(self) -> AbstractContextManager[Connection]:
        """A connection that can only query; each of its transactions sees one moment."""
        ...

    def transaction(self, connection: Connection) -> AbstractContextManager[None]:
        """A transaction that writes; durable when the block was left without an error."""
        ...

    def driver(self, connection: Connection) -> Driver:
        """The driver's connection below one of these."""
        ...

    def in_transaction(self, connection: Connection) -> bool:
        """Whether a transaction is open."""
        ...

    def failure(self, error: Exception) -> Exception:
        """What to tell the callers whose work ended with `error`; errors that are not the storage's stay what they are."""
        ...

    def ended(self, *, committed: bool) -> None:
        """A transaction that writes has ended; nobody was answered yet."""
        ...
