"""A private PostgreSQL server on the loopback address, for tests that need the real thing.

PostgreSQL refuses to run as root; there it runs as `nobody`. Data, socket and log live in a temporary folder.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import psycopg

from gpuscale.common.secrets import SecretUrl
from tests.support.guarded import GuardedFolder, GuardedProcess, PrivateServer
from tests.support.ports import free_port
from tests.support.waiting import eventually_sync

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 30.0
USER = "gpuscale"
PASSWORD = "loopback-only"
_NOBODY = 65534


def program(name: str) -> Path | None:
    """A program of the newest installed server; Debian keeps them out of the search path."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: int(path.parts[4]))
    on_path = shutil.which(name)
    return found[-1] if found else (Path(on_path) if on_path else None)


def why_unavailable() -> str | None:
    """Why no private server can run here, or None if one can."""
    if program("postgres") is None or program("initdb") is None:
        return "PostgreSQL is not installed (Debian package postgresql)"
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        return "PostgreSQL does not run as root, and setpriv is not installed (Debian package util-linux)"
    return None


class PostgresServer(PrivateServer):
    """One server; use it as a context manager. All methods block. `durable`: it waits for the disk, which only a test that kills it needs."""

    def __init__(self, *, durable: bool = False) -> None:
        self.port = free_port()
        self._durable = durable
        self._numbers = count(1)
        self._folder: GuardedFolder | None = None
        self._server: GuardedProcess | None = None

    def url(self, database: str = "postgres", *, password: str = PASSWORD) -> SecretUrl:
        return SecretUrl(f"postgresql://{USER}:{password}@127.0.0.1:{self.port}/{database}")

    def database(self, *, encoding: str = "UTF8") -> SecretUrl:
        name = f"test_{next(self._numbers)}"
        locale = "C" if encoding == "SQL_ASCII" else "C.UTF-8"
        self.run(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING '{encoding}' LOCALE '{locale}'")
        return self.url(name)

    def run(self, statement: str, database: str = "postgres") -> list[tuple[object, ...]]:
        """Run one statement as the owner of the server; its rows."""
        with psycopg.connect(self.url(database).reveal(), autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def cut(self, application: str = "gpuscale%") -> int:
        """End the sessions of some programs, as an operator would; how many there were."""
        return len(
            self.run(
                "SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity"
                f" WHERE application_name LIKE '{application}' AND pid <> pg_backend_pid()"
            )
        )

    def start(self) -> None:
        """Start it, on the data of the run before, if there was one; wait until it answers."""
        folder = self._folder or self._prepare()
        options = {
            "fsync": "on" if self._durable else "off",
            "unix_socket_directories": str(folder.path),
            "listen_addresses": "127.0.0.1",
            "shared_buffers": "16MB",
        }
        settings = [item for name, value in options.items() for item in ("-c", f"{name}={value}")]
        command = [str(program("postgres")), "-D", str(folder.path / "data"), "-p", str(self.port), *settings]
        self._server = folder.spawn("server", _unprivileged(command), {**os.environ})
        try:
            eventually_sync(self._answers, timeout=START_TIMEOUT_S, interval=0.05)
        except AssertionError as error:
            raise RuntimeError(f"PostgreSQL did not start: {error}\n{folder.tail()}") from error

    def stop(self) -> None:
        """End it in its fast way: sessions are cut, the data stays."""
        if self._server is not None:
            self._server.end(signal.SIGINT, STOP_TIMEOUT_S)
            self._server = None

    def close(self) -> None:
        if self._server is not None:
            self._server.end(signal.SIGKILL, STOP_TIMEOUT_S)
            self._server = None
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def _prepare(self) -> GuardedFolder:
        folder = GuardedFolder("gpuscale-postgresql-")
        self._folder = folder
        data, secret = folder.path / "data", folder.path / "password"
        data.mkdir(mode=0o700)
        secret.write_text(PASSWORD)
        if os.geteuid() == 0:
            for path in (folder.path, data, secret):
                os.chown(path, _NOBODY, _NOBODY)
        make = [str(program("initdb")), "-D", str(data), "-U", USER, "-E", "UTF8", "--locale=C.UTF-8"]
        make += ["--no-sync", "-A", "scram-sha-256", f"--pwfile={secret}"]
        subprocess.run(_unprivileged(make), check=True, capture_output=True, cwd=folder.path)
        return folder

    def _answers(self) -> bool:
        try:
            self.run("SELECT 1")
        except psycopg.OperationalError:
            return False
        return True


def _unprivileged(command: Sequence[str]) -> list[str]:
    if os.geteuid() != 0:
        return [*command]
    return ["setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups", *command]
