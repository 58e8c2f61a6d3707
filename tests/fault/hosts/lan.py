"""Hosts that are network namespaces, joined by a bridge, with links that a test cuts and heals.

Everything is in a user namespace of its own, so that no rights are needed where the kernel lets users have those, and
nothing is left behind: the namespaces are held by processes that end with the test's.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]
_UNSHARE = ("unshare", "--user", "--map-root-user", "--net")
_HOLD = ("sh", "-c", "echo ready; exec cat")


@cache
def why_unavailable() -> str | None:
    """Why there can be no such hosts here, or None if there can."""
    missing = [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"no {missing[0]} (Debian packages iproute2 and util-linux)"
    probe = "ip link add name br0 type bridge && ip link add name v0 type veth peer name v1 && ip link set v0 master br0"
    tried = subprocess.run(
        [*_UNSHARE, "sh", "-c", probe], check=False, capture_output=True, text=True, timeout=60
    )
    return None if tried.returncode == 0 else f"no network namespaces here: {tried.stderr.strip()}"


class Lan:
    """The hosts. The first has the bridge; the others have one link to it each."""

    def __init__(self, names: Sequence[str]) -> None:
        self._numbers = {name: number for number, name in enumerate(names, 1)}
        self._holders: dict[str, subprocess.Popen[str]] = {}
        self._started: list[subprocess.Popen[bytes]] = []
        self._first = names[0]

    def open(self) -> None:
        """Make them."""
        for name in self._numbers:
            before = [*_UNSHARE] if name == self._first else [*self.inside(self._first), "unshare", "--net"]
            holder = subprocess.Popen(
                [*before, *_HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            self._holders[name] = holder
            assert holder.stdout is not None
            assert holder.stdout.readline() == "ready\n"
        self._ip(self._first, "link add name br0 type bridge", "link set br0 up", "link set lo up")
        self._ip(self._first, f"addr add {self.address(self._first)}/24 dev br0")
        for name in list(self._numbers)[1:]:
            port, pid = self._port(name), self._holders[name].pid
            self._ip(self._first, f"link add name {port} type veth peer name eth0 netns {pid}")
            self._ip(self._first, f"link set {port} master br0", f"link set {port} up")
            self._ip(name, f"addr add {self.address(name)}/24 dev eth0", "link set eth0 up", "link set lo up")

    def close(self) -> None:
        """Kill everything that runs on them; they are gone then."""
        for holder in self._holders.values():
            for pid in _processes_of(holder.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        processes: list[subprocess.Popen[bytes] | subprocess.Popen[str]] = [
            *self._started,
            *self._holders.values(),
        ]
        for process in processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def address(self, name: str) -> str:
        """The IP address of a host."""
        return f"10.77.0.{self._numbers[name]}"

    def cut(self, name: str) -> None:
        """Take the link of a host down: nothing gets through, and nobody is told."""
        self._ip(self._first, f"link set {self._port(name)} down")

    def heal(self, name: str) -> None:
        """Take it up again."""
        self._ip(self._first, f"link set {self._port(name)} up")

    def start(
        self,
        name: str,
        *command: str,
        log: Path,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> subprocess.Popen[bytes]:
        """Run a program on a host; its output goes to the end of `log`."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*self.inside(name), *command],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=pass_fds,
            )
        self._started.append(process)
        return process

    def reach(self, name: str, *targets: str, log: Path) -> list[str]:
        """Addresses on this machine's loopback that lead to HOST:PORT as `name` reaches it.

        A listening socket is of the namespace it was made in, the connections that go on from there of the other.
        """
        listening = [socket.create_server(("127.0.0.1", 0)) for _ in targets]
        ways = [f"{one.fileno()}={target}" for one, target in zip(listening, targets, strict=True)]
        descriptors = [one.fileno() for one in listening]
        self.start(
            name, sys.executable, "-m", "tests.fault.hosts.reach", *ways, log=log, pass_fds=descriptors
        )
        addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in listening]
        for one in listening:
            one.close()
        return addresses

    def inside(self, name: str) -> list[str]:
        """Words before a command that is to run on a host."""
        pid = str(self._holders[name].pid)
        return ["nsenter", "--target", pid, "--user", "--net", "--preserve-credentials"]

    def _port(self, name: str) -> str:
        return f"port{self._numbers[name]}"

    def _ip(self, name: str, *commands: str) -> None:
        subprocess.run(
            [*self.inside(name), "ip", "-batch", "-"],
            input="".join(f"{command}\n" for command in commands),
            check=True,
            text=True,
            timeout=60,
        )


def _processes_of(holder: int) -> list[int]:
    """Every process in the network namespace of one."""
    try:
        own = Path(f"/proc/{holder}/ns/net").stat().st_ino
    except FileNotFoundError:
        return []
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdecimal() and (entry / "ns/net").stat().st_ino == own:
                found.append(int(entry.name))
    return found


@contextmanager
def lan(*names: str) -> Generator[Lan]:
    """Hosts of these names, the first with the bridge."""
    hosts = Lan(names)
    try:
        hosts.open()
        yield hosts
    finally:
        hosts.close()
