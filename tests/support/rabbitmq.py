"""A private RabbitMQ broker on the loopback address, for tests that need the real thing.

It runs the server script of the installed package directly (the wrapper in the search path changes the user) with
its own home, node name, ports, data and Erlang port mapper, so it meets no other broker on the machine.
"""

import os
import shutil
import signal
from pathlib import Path
from urllib.parse import quote

import httpx

from tests.support.guarded import GuardedFolder, GuardedProcess, PrivateServer
from tests.support.ports import free_port, listens
from tests.support.waiting import eventually_sync

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 30.0

_PACKAGE_PLACES = (
    "/usr/lib/rabbitmq/lib",
    "/usr/lib64/rabbitmq/lib",
    "/opt/rabbitmq",
    "/usr/local/lib/rabbitmq/lib",
)

# Statistics twice a second instead of every five, so that the management API is fresh in tests.
_CONFIG = """\
listeners.tcp.local = 127.0.0.1:{amqp_port}
management.tcp.ip = 127.0.0.1
management.tcp.port = {management_port}
collect_statistics_interval = 500
default_user = {user}
default_pass = {password}
disk_free_limit.absolute = 1MB
log.console = false
"""


def server_script() -> Path | None:
    """The newest installed `rabbitmq-server` script, or None without the package."""
    found = [path for place in _PACKAGE_PLACES for path in Path(place).glob("**/sbin/rabbitmq-server")]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def port_mapper() -> str | None:
    """The Erlang port mapper `epmd`: from the search path, or from the Erlang installation."""
    inside = sorted(Path("/usr/lib/erlang").glob("erts-*/bin/epmd"))
    return shutil.which("epmd") or (str(inside[-1]) if inside else None)


def why_unavailable() -> str | None:
    """Why no private broker can run here, or None if one can."""
    if os.name != "posix":
        return "the private RabbitMQ broker needs a POSIX system"
    if server_script() is None:
        return "RabbitMQ is not installed (Debian package rabbitmq-server)"
    if shutil.which("erl") is None or port_mapper() is None:
        return "Erlang is not installed (Debian package erlang-base)"
    return None


class RabbitBroker(PrivateServer):
    """One broker process with its management plugin; use it as a context manager, or `start` and `close` it.

    All methods block; call the slow ones (`start`, `kill`) in a thread from async tests. Ports, node name
    and data stay the same over `kill` and `start`, so clients may reconnect to the same URL.
    """

    def __init__(self) -> None:
        self.user = "gpuscale"
        self.password = "loopback-only"
        self.amqp_port = free_port()
        self.management_port = free_port()
        self.amqp_url = f"amqp://{self.user}:{self.password}@127.0.0.1:{self.amqp_port}/"
        self.management_url = f"http://127.0.0.1:{self.management_port}"
        self._epmd_port = free_port()
        self._distribution_port = free_port()
        self._folder: GuardedFolder | None = None
        self._server: GuardedProcess | None = None

    @property
    def running(self) -> bool:
        """True while the server's process exists, even if it is paused."""
        return self._server is not None and self._server.running

    def start(self) -> None:
        """Start the broker and wait until it answers AMQP and HTTP; on the data of the run before, if there was one.

        Raises RuntimeError: it cannot run here, or it ended or stayed silent; the text holds the end of its output.
        """
        script = server_script()
        if script is None:
            raise RuntimeError(why_unavailable())
        if self.running:
            return
        folder = self._folder or self._prepare()
        self._server = folder.spawn("server", [str(script)], self._environment(folder.path))
        try:
            eventually_sync(self._is_up, timeout=START_TIMEOUT_S, interval=0.05)
        except AssertionError as error:
            raise RuntimeError(f"the broker did not start: {error}\n{folder.tail()}") from error

    def kill(self) -> None:
        """End the broker at once, as `kill -9` or a power cut of its host would; the data stays."""
        if self._server is not None:
            self._server.end(signal.SIGKILL, STOP_TIMEOUT_S)
            self._server = None
            eventually_sync(lambda: not listens(self.amqp_port))

    def pause(self) -> None:
        """Freeze the broker: connections stay open and nothing answers."""
        if self._server is not None:
            self._server.send(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused broker go on; harmless otherwise."""
        if self._server is not None:
            self._server.send(signal.SIGCONT)

    def clear(self) -> None:
        """Delete every queue, with what is in it."""
        with httpx.Client(
            base_url=self.management_url, auth=(self.user, self.password), timeout=30
        ) as client:
            for queue in client.get("/api/queues").raise_for_status().json():
                place = f"{quote(queue['vhost'], safe='')}/{quote(queue['name'], safe='')}"
                deleted = client.delete(f"/api/queues/{place}")
                if (
                    deleted.status_code != httpx.codes.NOT_FOUND
                ):  # it went with the connection that declared it
                    deleted.raise_for_status()

    def close(self) -> None:
        """End the broker and its port mapper and remove every file; a later `start` begins with no data."""
        self.kill()
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def _prepare(self) -> GuardedFolder:
        """Write the configuration and start the port mapper."""
        epmd = port_mapper()
        if epmd is None:
            raise RuntimeError(why_unavailable())
        self._folder = folder = GuardedFolder("gpuscale-rabbitmq-")
        for name in ("home", "data", "log"):
            (folder.path / name).mkdir()
        ports = {"amqp_port": self.amqp_port, "management_port": self.management_port}
        config = _CONFIG.format(user=self.user, password=self.password, **ports)
        (folder.path / "rabbitmq.conf").write_text(config)
        (folder.path / "enabled_plugins").write_text("[rabbitmq_management].\n")
        # In the foreground, as our child: the one the server would start by itself outlives it.
        command = [epmd, "-port", str(self._epmd_port), "-address", "127.0.0.1"]
        folder.spawn("epmd", command, self._environment(folder.path))
        eventually_sync(lambda: listens(self._epmd_port), interval=0.01)
        return folder

    def _environment(self, folder: Path) -> dict[str, str]:
        """Nothing of the caller's environment but its search path, so that no RABBITMQ_ setting leaks in."""
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(folder / "home"),
            "LANG": "C.UTF-8",
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"gpuscale{self.amqp_port}@localhost",
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_MNESIA_BASE": str(folder / "data"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "enabled_plugins"),
            "RABBITMQ_CONF_ENV_FILE": str(folder / "no-such-file"),
            "RABBITMQ_SERVER_ERL_ARGS": "+S 2:2 +sbwt none",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
                "-start_epmd false -kernel inet_dist_use_interface {127,0,0,1}"
            ),
        }

    def _is_up(self) -> bool:
        if not self.running:
            raise RuntimeError(
                f"the broker ended while it started\n{self._folder.tail() if self._folder else ''}"
            )
        if not listens(self.amqp_port):
            return False
        try:
            answer = httpx.get(
                f"{self.management_url}/api/overview", auth=(self.user, self.password), timeout=5
            )
        except httpx.TransportError:
            return False
        return answer.is_success
