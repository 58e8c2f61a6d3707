"""Connections to PostgreSQL: how a service logs in, and what it asks of the server for a session.

Only this module, `postgres_store`, `leadership` and `prepared` know the driver; it is imported where a service is told to
use PostgreSQL (extra `postgresql`).
"""

from typing import Final, LiteralString, TypeAlias, TypeGuard

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.rows import TupleRow
from sqlalchemy import Connection

from gpuscale.common.errors import FailedPreconditionError, UnavailableError
from gpuscale.common.secrets import SecretUrl

IntegrityError: TypeAlias = psycopg.IntegrityError
Driver: TypeAlias = psycopg.Connection[TupleRow]

LEASE: Final = 3.0
"""Seconds of silence after which the server ends a session of the leader, and with it its lead."""
OLDEST_SERVER: Final = 140_000
"""PostgreSQL 14: `idle_session_timeout`."""
# A host that vanished is noticed within 3 s; the URL may say otherwise.
_DEFAULTS: Final = {
    "connect_timeout": "3",
    "keepalives": "1",
    "keepalives_idle": "1",
    "keepalives_interval": "1",
    "keepalives_count": "2",
    "tcp_user_timeout": "3000",
}
_REFUSED: Final = ("password", "does not exist", "pg_hba.conf", "not permitted to log in")


def raw(connection: Connection) -> Driver:
    """The driver's connection below a store's."""
    driver: object = connection.connection.driver_connection
    if not _is_driver(driver):
        raise TypeError("not a connection of a store")
    return driver


def _is_driver(one: object) -> TypeGuard[Driver]:
    return isinstance(one, psycopg.Connection)


def conninfo(url: SecretUrl, application: str) -> str:
    """What the driver connects with: the URL, and our defaults for what it does not say.

    Raises:
        FailedPreconditionError: the driver does not understand the URL; the error shows nothing of it.
    """
    try:
        given = conninfo_to_dict(url.reveal())
    except psycopg.ProgrammingError:
        raise FailedPreconditionError(
            f"the URL of the database {url} is not one that PostgreSQL's library understands",
            reason="DATABASE_REFUSED",
        ) from None
    # Our texts are UTF-8, also where the database has no encoding (SQL_ASCII): the driver would give bytes there.
    own = {"application_name": application, "client_encoding": "UTF8"}
    return make_conninfo("", **{**_DEFAULTS, **given, **own})


def connect_error(url: SecretUrl, error: psycopg.Error) -> FailedPreconditionError | UnavailableError:
    """Why no connection came about, for people. The library names host, user and database, never the password."""
    why = " ".join(str(error).split())
    # While a connection is made the library gives no SQLSTATE, only the server's words.
    if any(words in why for words in _REFUSED):
        return refused(url, error)
    return UnavailableError(f"PostgreSQL at {url} cannot be used: {why}", reason="STATE_UNAVAILABLE")


def refused(url: SecretUrl, error: psycopg.Error) -> FailedPreconditionError:
    """The error where waiting does not help."""
    why = " ".join(str(error).split())
    return FailedPreconditionError(f"PostgreSQL at {url} refuses: {why}", reason="DATABASE_REFUSED")


def store_application(service: str) -> str:
    """What the sessions of a service's store are called in `pg_stat_activity`."""
    return f"gpuscale-{service}"


def schema_of(service: str) -> sql.Identifier:
    """The schema (the namespace in the database) that keeps what a service has."""
    return sql.Identifier(service)


def in_schema(statement: LiteralString, service: str) -> sql.Composed:
    """A statement with the service's schema in place of `{}`."""
    return sql.SQL(statement).format(schema_of(service))


def too_old(version: int) -> FailedPreconditionError | None:
    """The error for a server that lacks what leadership is built on; None for one that has it."""
    if version >= OLDEST_SERVER:
        return None
    return FailedPreconditionError(
        f"PostgreSQL {version // 10_000} is too old: version 14 or later is needed", reason="DATABASE_REFUSED"
    )
