"""The PostgreSQL backend of a store: connections, tables, errors.

Only this module and `leadership` import the driver (extra `postgresql`), and only if a service uses it.

Only the leader opens the store. Every write transaction first checks the epoch, under a lock that the next leader waits
for: late writes of an earlier leader are refused, and the next leader reads all earlier ones. A failed connection or
commit ends the term, as only the database knows whether the commit happened.
"""

from collections.abc import Generator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Final, LiteralString, TypeAlias, cast

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow
from sqlalchemy import Connection, ExceptionContext, MetaData, NullPool, create_engine, event
from sqlalchemy.exc import DBAPIError

from gpuscale.common.errors import FailedPreconditionError, InternalError, UnavailableError
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.secrets import DatabaseUnavailableError, SecretUrl
from gpuscale.common.store.store import Backend, Migrations
from gpuscale.common.store.term import Term

IntegrityError: TypeAlias = psycopg.IntegrityError
Driver: TypeAlias = psycopg.Connection[TupleRow]

LEASE: Final = 3.0
"""Seconds of silence after which the server ends the leader's session and so its lead."""
OLDEST_SERVER: Final = 140_000
"""PostgreSQL 14, the first with `idle_session_timeout`."""
# Notices a vanished host within 3 s; the URL may override these.
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
    """The driver's connection of a store's connection."""
    driver: object = connection.connection.driver_connection
    if not isinstance(driver, psycopg.Connection):
        raise TypeError("not a connection of a store")
    return cast("Driver", driver)


def conninfo(url: SecretUrl, application: str) -> str:
    """The connection string: the URL with our defaults. Raises FailedPreconditionError: invalid URL; the error shows no secret of it."""
    try:
        given = conninfo_to_dict(url.reveal())
    except psycopg.ProgrammingError:
        given = None
    # The library ends the password at the first '@', and would show what follows it as the host.
    if given is None or "@" in str(given.get("host")):
        raise FailedPreconditionError(
            f"the URL of the database {url} is invalid: percent-encode the special characters of user and password",
            reason="DATABASE_REFUSED",
        )
    # With SQL_ASCII, a database without encoding, the driver would return bytes.
    own = {"application_name": application, "client_encoding": "UTF8"}
    return make_conninfo("", **{**_DEFAULTS, **given, **own})


def connect_error(url: SecretUrl, error: psycopg.Error) -> FailedPreconditionError | UnavailableError:
    """The error of a failed connection. The library names host, user and database, never the password."""
    why = " ".join(str(error).split())
    # While connecting, the library gives the server's message but no SQLSTATE.
    if any(words in why for words in _REFUSED):
        return refused(url, error)
    return DatabaseUnavailableError(f"PostgreSQL at {url} cannot be used: {why}", reason="STATE_UNAVAILABLE")


def probe(url: SecretUrl) -> None:
    """Test whether a connection works.

    Raises:
        FailedPreconditionError: the server refuses or is too old, or the URL is invalid.
        UnavailableError: it does not answer.
    """
    try:
        with psycopg.connect(conninfo(url, "gpuscalectl")) as connection:
            old = too_old(connection.info.server_version)
    except psycopg.Error as error:
        raise connect_error(url, error) from None
    if old is not None:
        raise old


def refused(url: SecretUrl, error: psycopg.Error) -> FailedPreconditionError:
    """The error if a retry cannot succeed."""
    why = " ".join(str(error).split())
    return FailedPreconditionError(f"PostgreSQL at {url} refuses: {why}", reason="DATABASE_REFUSED")


def store_application(service: str) -> str:
    """What the sessions of a service's store are called in `pg_stat_activity`."""
    return f"gpuscale-{service}"


def in_schema(statement: LiteralString, service: str) -> sql.Composed:
    """A statement with the service's schema for `{}`."""
    return sql.SQL(statement).format(sql.Identifier(service))


def too_old(version: int) -> FailedPreconditionError | None:
    """The error for a server that is too old; None otherwise."""
    if version >= OLDEST_SERVER:
        return None
    return FailedPreconditionError(
        f"PostgreSQL {version // 10_000} is too old: version 14 or later is needed", reason="DATABASE_REFUSED"
    )


STATEMENT_LIMIT: Final = 10.0
"""Time limit of a statement, in seconds."""
_DURABLE: Final = frozenset({"on", "remote_apply"})
_DISK_FULL: Final = "53100"
_DAMAGED: Final = frozenset({"XX001", "XX002"})
# Failed connections, stopping servers, sessions ended by the server.
_LOST: Final = ("08", "57P", "25P03", "25P04")

_log = get_logger(__name__)


@dataclass(frozen=True)
class Postgres(Backend):
    """A service's schema in PostgreSQL, for one term. Reserves no disk space.

    An earlier `version` of the schema is migrated, by `migrations` from each.
    """

    url: SecretUrl
    service: str
    metadata: MetaData
    version: int
    migrations: Migrations
    term: Term
    errors: ClassVar[tuple[type[Exception], ...]] = (psycopg.Error, DBAPIError)

    @property
    def where(self) -> str:
        """The schema."""
        return f"schema {self.service} of {self.url}"

    @contextmanager
    def writer(self) -> Generator[Connection]:
        """The connection that writes.

        Raises:
            FailedPreconditionError: STATE_VERSION, no migrations from the stored version; nothing changes.
            UnavailableError: as `failure`, or LEAD_LOST.
        """
        with self._session("", idle=LEASE) as connection:
            with self.opening():
                driver = raw(connection)
                # An acknowledged commit must be on disk, whatever the server's default.
                if _setting(driver, "synchronous_commit") not in _DURABLE:
                    driver.execute("SET synchronous_commit = on")
                if _setting(driver, "fsync") != "on":
                    _log.warning("PostgreSQL runs with fsync off: a power failure may lose commits")
                with self.transaction(connection):
                    self._upgrade(connection)
            yield connection

    @contextmanager
    def reader(self) -> Generator[Connection]:
        """A read-only connection. Once the term is over, transactions are refused (LEAD_LOST).

        It has no idle timeout: nobody waits for it, and the next leader ends it.
        """
        with self._session("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY", idle=0) as connection:
            yield connection

    @contextmanager
    def transaction(self, connection: Connection) -> Generator[None]:
        """A write transaction, if the epoch is still that of the term; ended as in `sqlite_store`."""
        driver = raw(connection)
        committed = False
        try:
            # The next leader waits for this transaction.
            if not self.term.leads():
                raise self._lead_lost()
            cursor = driver.execute("BEGIN; SELECT epoch FROM leadership FOR SHARE", prepare=False)
            cursor.nextset()
            row = cursor.fetchone()
            if row is None or row[0] != self.term.epoch:
                self.term.resign()
                raise self._lead_lost()
            yield
            if driver.info.transaction_status != TransactionStatus.INTRANS:
                # PostgreSQL accepts the COMMIT of a failed transaction, and rolls it back.
                raise InternalError("work continued after its transaction had ended")
            self._commit(connection, driver)
            committed = True
        finally:
            if not committed:
                with suppress(psycopg.Error, DBAPIError):
                    connection.rollback()
                    driver.rollback()

    def in_transaction(self, connection: Connection) -> bool:
        """Whether a transaction is open."""
        return raw(connection).info.transaction_status != TransactionStatus.IDLE

    def failure(self, error: Exception) -> Exception:
        """The error for callers whose work raised `error`; ends the term if the connection is lost."""
        cause = error.orig if isinstance(error, DBAPIError) else error
        if not isinstance(cause, psycopg.Error):
            return error
        state = cause.sqlstate
        if state in _DAMAGED:
            return FailedPreconditionError("the state is damaged", reason="STATE_UNREADABLE")
        if state == _DISK_FULL:
            return UnavailableError("the disk of the state is full", reason="DISK_FULL")
        broken = state is None and isinstance(cause, (psycopg.OperationalError, psycopg.InterfaceError))
        if broken or (state is not None and state.startswith(_LOST)):
            self.term.resign()
        elif not isinstance(cause, (psycopg.OperationalError, psycopg.errors.ReadOnlySqlTransaction)):
            return error
        why = " ".join(str(cause).split())
        return DatabaseUnavailableError(f"the state cannot be used now: {why}", reason="STATE_UNAVAILABLE")

    def _commit(self, connection: Connection, driver: Driver) -> None:
        """Commit; end the term if it fails or is in doubt."""
        doubts: list[str] = []

        def doubt(notice: psycopg.errors.Diagnostic) -> None:
            if notice.severity_nonlocalized == "WARNING":
                doubts.append(notice.message_primary or "")

        committed = False
        driver.add_notice_handler(doubt)
        try:
            if connection.in_transaction():
                connection.commit()
            else:
                driver.commit()
            committed = not doubts
        finally:
            driver.remove_notice_handler(doubt)
            if not committed:
                self.term.resign()
        if doubts:
            raise UnavailableError(
                f"the commit is in doubt: {' '.join(doubts[0].split())}", reason="STATE_UNAVAILABLE"
            )

    def _lead_lost(self) -> UnavailableError:
        """The error after the term; not NOT_LEADER, as the call may already have written."""
        return UnavailableError(
            f"this process no longer leads the service {self.service}; the call may have been executed",
            reason="LEAD_LOST",
            retry_after=0.2,
        )

    def _upgrade(self, connection: Connection) -> None:
        driver = raw(connection)
        driver.execute("SET LOCAL statement_timeout = 0")
        driver.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
        there = driver.execute("SELECT to_regclass('alembic_version')").fetchone()
        if there is None or there[0] is None:
            self.metadata.create_all(connection)
            driver.execute("CREATE TABLE alembic_version (version_num varchar(32) PRIMARY KEY)")
            driver.execute("INSERT INTO alembic_version VALUES (%s)", (str(self.version),))
            return
        row = driver.execute("SELECT version_num FROM alembic_version").fetchone()
        found = int(row[0]) if row is not None and str(row[0]).isdecimal() else 0
        self.check_version(found)
        for step in range(found, self.version):
            self.migrations[step](connection)
        self.metadata.create_all(connection)  # a new table needs no new version
        if found == self.version:
            return
        driver.execute("UPDATE alembic_version SET version_num = %s", (str(self.version),))
        _log.info("migrated the state", service=self.service, found=found, version=self.version)

    @contextmanager
    def _session(self, begin: str, *, idle: float) -> Generator[Connection]:
        """A connection outside a pool that begins its transactions with `begin`.

        The server ends a transaction that is idle for `idle` seconds (0: never).
        """
        with self.opening():
            try:
                driver: Driver = psycopg.connect(
                    conninfo(self.url, store_application(self.service)), autocommit=True
                )
            except psycopg.Error as error:
                raise connect_error(self.url, error) from None
            values: dict[str, Any] = {
                "idle_in_transaction_session_timeout": str(int(idle * 1000)),
                "statement_timeout": str(int(STATEMENT_LIMIT * 1000)),
                "client_min_messages": "warning",  # `_commit` reads them
                "search_path": in_schema("{}", self.service).as_string(driver),
            }
            for name, value in values.items():
                driver.execute("SELECT set_config(%s, %s, false)", (name, value))
            # Parameters would appear in errors and so in logs.
            engine = create_engine(
                "postgresql+psycopg://",
                creator=lambda: driver,
                poolclass=NullPool,
                pool_reset_on_return=None,  # an open transaction ends with its connection
                hide_parameters=True,
            )

            def on_begin(_: Connection) -> None:
                if driver.info.transaction_status != TransactionStatus.IDLE:
                    return  # begun by `transaction`, or by SQLAlchemy's first connect
                if not self.term.leads():
                    raise self._lead_lost()
                driver.execute(begin.encode())

            def on_error(context: ExceptionContext) -> None:
                context.is_disconnect = False  # there is no other connection to use

            connection = engine.connect()
            event.listen(engine, "handle_error", on_error)
            if begin:
                event.listen(engine, "begin", on_begin)
        with closing(driver), closing(connection):
            yield connection


def _setting(driver: Driver, name: str) -> str:
    row = driver.execute("SELECT current_setting(%s)", (name,)).fetchone()
    return "" if row is None else str(row[0])
