"""PostgreSQL as a store: how a service logs in, its tables, and what errors mean.

Only this module and `leadership` import the driver (extra `postgresql`), and are imported where a service is told to use it.

Only the process that leads opens the store. Every transaction that writes begins with a look at the epoch, under a lock
that the next leader has to wait for: what an earlier leader writes late is refused, and what it wrote before is there to
be read. A connection or a commit that fails ends the term: only the database knows what is true then.
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
from gpuscale.common.secrets import SecretUrl
from gpuscale.common.store.store import Backend, Migrations
from gpuscale.common.store.term import Term

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
    if not isinstance(driver, psycopg.Connection):
        raise TypeError("not a connection of a store")
    return cast("Driver", driver)


def conninfo(url: SecretUrl, application: str) -> str:
    """What the driver connects with: the URL, and our defaults for what it leaves out.

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
    """Why the connection failed, for people. The library names host, user and database, never the password."""
    why = " ".join(str(error).split())
    # While a connection is made the library gives no SQLSTATE, only the server's words.
    if any(words in why for words in _REFUSED):
        return refused(url, error)
    return UnavailableError(f"PostgreSQL at {url} cannot be used: {why}", reason="STATE_UNAVAILABLE")


def probe(url: SecretUrl) -> None:
    """Connect once, and leave.

    Raises:
        FailedPreconditionError: the server refuses, is too old, or the URL is none that the driver understands.
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
    """The error where waiting does not help."""
    why = " ".join(str(error).split())
    return FailedPreconditionError(f"PostgreSQL at {url} refuses: {why}", reason="DATABASE_REFUSED")


def store_application(service: str) -> str:
    """What the sessions of a service's store are called in `pg_stat_activity`."""
    return f"gpuscale-{service}"


def in_schema(statement: LiteralString, service: str) -> sql.Composed:
    """A statement with the service's schema in place of `{}`."""
    return sql.SQL(statement).format(sql.Identifier(service))


def too_old(version: int) -> FailedPreconditionError | None:
    """The error for a server that is too old for leadership; None for one that is not."""
    if version >= OLDEST_SERVER:
        return None
    return FailedPreconditionError(
        f"PostgreSQL {version // 10_000} is too old: version 14 or later is needed", reason="DATABASE_REFUSED"
    )


STATEMENT_LIMIT: Final = 10.0
"""Seconds that a statement may take."""
_DURABLE: Final = frozenset({"on", "remote_apply"})
_DISK_FULL: Final = "53100"
_DAMAGED: Final = frozenset({"XX001", "XX002"})
# Connections that failed, servers that stop, sessions that the server ended.
_LOST: Final = ("08", "57P", "25P03", "25P04")

_log = get_logger(__name__)


@dataclass(frozen=True)
class Postgres(Backend):
    """A service's schema in PostgreSQL, for one term. Its disk is the server's, which keeps no room.

    Args:
        url: of the database.
        service: which service; also the name of its schema.
        metadata: the tables.
        version: of the schema; a newer one is refused, an earlier one is taken to this one by
        migrations: by the version that each starts from.
        term: in which this process leads.
    """

    url: SecretUrl
    service: str
    metadata: MetaData
    version: int
    migrations: Migrations
    term: Term
    errors: ClassVar[tuple[type[Exception], ...]] = (psycopg.Error, DBAPIError)

    @contextmanager
    def writer(self) -> Generator[Connection]:
        """The connection that writes.

        Raises:
            FailedPreconditionError: STATE_VERSION for a schema version that no migration starts from; nothing is changed.
            UnavailableError: as `failure` says, or LEAD_LOST.
        """
        with self._session("", idle=LEASE) as connection:
            with self._state_errors():
                driver = raw(connection)
                # An acknowledged commit must be on disk, whatever the server's default is for sessions.
                if _setting(driver, "synchronous_commit") not in _DURABLE:
                    driver.execute("SET synchronous_commit = on")
                if _setting(driver, "fsync") != "on":
                    _log.warning(
                        "PostgreSQL runs with fsync off: what it acknowledges may be lost with the power"
                    )
                with self.transaction(connection):
                    self._upgrade(connection)
            yield connection

    @contextmanager
    def reader(self) -> Generator[Connection]:
        """A connection that can only query. A transaction is refused (LEAD_LOST) once the term is over.

        It may take its time over what it has read: nobody waits for it, and the next leader ends it.
        """
        with self._session("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY", idle=0) as connection:
            yield connection

    @contextmanager
    def transaction(self, connection: Connection) -> Generator[None]:
        """A transaction that writes, if the epoch is still that of the term; ended as in `sqlite_store`."""
        driver = raw(connection)
        committed = False
        try:
            self._begin(driver)
            yield
            if driver.info.transaction_status != TransactionStatus.INTRANS:
                # PostgreSQL would answer the COMMIT of a transaction that has failed, and undo it.
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
        """The error for the callers whose work ended with `error`; ends the term if the connection is unusable."""
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
        return UnavailableError(f"the state cannot be used now: {why}", reason="STATE_UNAVAILABLE")

    def _begin(self, driver: Driver) -> None:
        """Begin a transaction that the next leader has to wait for."""
        if not self.term.leads():
            raise self._lead_lost()
        cursor = driver.execute("BEGIN; SELECT epoch FROM leadership FOR SHARE", prepare=False)
        cursor.nextset()
        row = cursor.fetchone()
        if row is None or row[0] != self.term.epoch:
            self.term.resign()
            raise self._lead_lost()

    def _commit(self, connection: Connection, driver: Driver) -> None:
        """Commit; if that fails, or may be incomplete, only the database knows what is true."""
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
        """Not NOT_LEADER, which says that nothing was done: the call may have written before."""
        return UnavailableError(
            f"this process no longer leads the service {self.service}; the call may have been executed",
            reason="LEAD_LOST",
            retry_after=0.2,
        )

    def _upgrade(self, connection: Connection) -> None:
        """Make the tables, or take those of an earlier version to this one."""
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
        if not all(step in self.migrations for step in range(found, self.version)) or found > self.version:
            raise FailedPreconditionError(
                f"the state in schema {self.service} of {self.url} has version {found}, this program writes version"
                f" {self.version}; it was left as it is",
                reason="STATE_VERSION",
                metadata={"found": str(found), "wanted": str(self.version)},
            )
        for step in range(found, self.version):
            self.migrations[step](connection)
        self.metadata.create_all(connection)  # a table that is new needs no new version
        if found == self.version:
            return
        driver.execute("UPDATE alembic_version SET version_num = %s", (str(self.version),))
        _log.info("migrated the state", service=self.service, found=found, version=self.version)

    @contextmanager
    def _session(self, begin: str, *, idle: float) -> Generator[Connection]:
        """A connection outside of any pool that begins its transactions with `begin`.

        The server ends one that does nothing for `idle` seconds; never with 0.
        """
        with self._state_errors():
            driver = self._connect(idle)
            # Parameters are hidden: they would stand in the text of errors, and so in logs.
            engine = create_engine(
                "postgresql+psycopg://",
                creator=lambda: driver,
                poolclass=NullPool,
                pool_reset_on_return=None,  # a transaction that is open at the end ends with its connection
                hide_parameters=True,
            )

            def on_begin(_: Connection) -> None:
                if driver.info.transaction_status != TransactionStatus.IDLE:
                    return  # `transaction` has begun it already, or SQLAlchemy gets to know the server
                if not self.term.leads():
                    raise self._lead_lost()
                driver.execute(begin.encode())

            def on_error(context: ExceptionContext) -> None:
                context.is_disconnect = False  # there is no other connection to go on with

            connection = engine.connect()
            event.listen(engine, "handle_error", on_error)
            if begin:
                event.listen(engine, "begin", on_begin)
        with closing(driver), closing(connection):
            yield connection

    def _connect(self, idle: float) -> Driver:
        try:
            driver: Driver = psycopg.connect(
                conninfo(self.url, store_application(self.service)), autocommit=True
            )
        except psycopg.Error as error:
            raise connect_error(self.url, error) from None
        values: dict[str, Any] = {
            "idle_in_transaction_session_timeout": str(int(idle * 1000)),
            "statement_timeout": str(int(STATEMENT_LIMIT * 1000)),
            "client_min_messages": "warning",  # `_commit` listens to them
            "search_path": in_schema("{}", self.service).as_string(driver),
        }
        for name, value in values.items():
            driver.execute("SELECT set_config(%s, %s, false)", (name, value))
        return driver

    @contextmanager
    def _state_errors(self) -> Generator[None]:
        try:
            yield
        except (psycopg.Error, DBAPIError) as error:
            found = self.failure(error)
            if isinstance(found, UnavailableError):
                raise found from error
            why = " ".join(str(error.orig if isinstance(error, DBAPIError) else error).split())
            raise FailedPreconditionError(
                f"the state in schema {self.service} of {self.url} cannot be used ({why})",
                reason="STATE_UNREADABLE",
            ) from error


def _setting(driver: Driver, name: str) -> str:
    row = driver.execute("SELECT current_setting(%s)", (name,)).fetchone()
    return "" if row is None else str(row[0])
