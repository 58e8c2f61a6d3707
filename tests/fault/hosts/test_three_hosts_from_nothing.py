"""Three hosts, from nothing to mutual TLS with a standby and two users, in six commands; then a year of an operator's in minutes."""

import os
import re
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest

from tests.fault.hosts.lan import Lan, lan, why_unavailable
from tests.support.nvml_double import NvmlDouble, env_with_double
from tests.support.nvml_double import why_unavailable as why_no_double
from tests.support.postgresql import PostgresServer
from tests.support.postgresql import why_unavailable as why_no_database
from tests.support.up import CTL, ctl_environment
from tests.support.waiting import eventually_sync

LINE = re.compile(
    r"^gpuscalectl (join 10\.77\.0\.1:7070,10\.77\.0\.2:7070 --token \S+ --ca-hash sha256:\S+)( --role standby .* FILE)?$",
    re.MULTILINE,
)
PROGRAMS = {"gpuscale-fleet", "gpuscale-allocator", "gpuscale-autoscaler", "gpuscale-gateway"}
MINUTES = 3


def children(pid: int) -> dict[str, int]:
    """The programs that a process runs: pids by name."""
    pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    words = {int(one): Path(f"/proc/{one}/cmdline").read_text().split("\0") for one in pids}
    return {Path(line[1]).name: one for one, line in words.items() if len(line) > 1}  # a zombie has none


class Hosts:
    """Three hosts, and what is typed on them."""

    def __init__(self, network: Lan, place: Path) -> None:
        self.network = network
        self.place = place
        self.typed = 0

    def starts(self, host: str, *words: str) -> "subprocess.Popen[bytes]":
        """Type a command that goes on."""
        self.typed += 1
        (place := self.place / f"double-{host}").mkdir()
        double = NvmlDouble(place)
        for index, gpu in enumerate(double.gpus):
            gpu.uuid = f"GPU-{host}-{index}"
        double.write()
        words = (*CTL, *words, "--dir", str(self.place / host))
        log = self.place / f"{host}.log"
        return self.network.start(host, *words, log=log, environment=env_with_double(double))

    def said(self, host: str, line: str | re.Pattern[str]) -> list[tuple[str, ...]]:
        return re.findall(line, (self.place / f"{host}.log").read_text())

    def types(self, who: str, *words: str, host: str = "first") -> "subprocess.CompletedProcess[str]":
        """Type a command of a person, or of the admin."""
        self.typed += 1
        variables = ctl_environment(GPUSCALE_CONTEXTS=str(self.place / who / "contexts.toml"))
        if who == "admin":
            folder = self.place / "first"
            where = f"--address 10.77.0.1:7070,10.77.0.2:7070 --ca-file {folder}/pki/ca.crt --token-file {folder}/admin.token"
            words = (*where.split(), *words)
        return self.network.run(host, *CTL, *words, environment=variables)

    def must(self, who: str, *words: str) -> str:
        ran = self.types(who, *words)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout


NEEDED = why_unavailable() or why_no_double() or why_no_database()


@pytest.mark.skipif(bool(NEEDED), reason=str(NEEDED))
def test_three_hosts_from_nothing(tmp_path: Path) -> None:
    with PostgresServer() as database, lan("first", "second", "left") as network:
        sockets = database.run("SHOW unix_socket_directories")[0][0]
        Path(str(sockets)).chmod(0o755)  # the way to it from other namespaces
        url = tmp_path / "url"
        url.write_text(f"{database.database().reveal()}?host={sockets}")
        url.chmod(0o600)
        hosts, began = Hosts(network, tmp_path), time.monotonic()
        standby = ("--standby", "10.77.0.2", "--database-file", str(url))
        first = hosts.starts("first", "init", "--host", "10.77.0.1", *standby, "--run")
        eventually_sync(lambda: len(hosts.said("first", LINE)) == 2, timeout=90)
        [(of_gpus, _), (of_standby, more)] = hosts.said("first", LINE)
        second = hosts.starts("second", *f"{of_standby}{more}".replace("FILE", str(url)).split(), "--run")
        left = hosts.starts("left", *of_gpus.split(), "--node", "left", "--run")
        codes = hosts.must(
            "admin",
            "login-code",
            "create",
            "alice",
            "bob",
            "--role",
            "operator",
            "-o",
            "jsonpath={.codes[*].code}",
        )
        line = f"login 10.77.0.1:7070,10.77.0.2:7070 {' '.join(of_gpus.split()[-2:])} --as lab --code-file".split()
        for name, code in zip(("alice", "bob"), codes.split(), strict=True):
            (tmp_path / f"{name}.code").write_text(code)
            assert f"logged in as {name} (operator)" in hosts.must(
                name, *line, str(tmp_path / f"{name}.code")
            )
        eventually_sync(partial(hosts.said, "left", "left is ONLINE"), timeout=90)
        eventually_sync(partial(hosts.said, "second", "serves as standby"), timeout=90)
        assert (hosts.typed, time.monotonic() - began < MINUTES * 60) == (6, True)
        _year(hosts, {"first": first, "second": second, "left": left})
        for process in (left, second, first):
            process.terminate()
            assert process.wait(60) == 0


def _year(hosts: Hosts, running: "dict[str, subprocess.Popen[bytes]]") -> None:
    """Add, upgrade, lose, revoke, who: with a lease that lives through all of it."""
    ours = {host: children(process.pid) for host, process in running.items()}
    assert (ours["first"].keys(), ours["second"].keys()) == (PROGRAMS, PROGRAMS - {"gpuscale-fleet"})
    eventually_sync(lambda: hosts.must("alice", "get", "adapters").count("CONNECTED") == 1, timeout=60)
    held = hosts.must(
        "alice", "reserve", "--gpus", "1", "--ttl", "10m", "--max-utilization", "100", "-o", "name"
    ).strip()
    refused = hosts.types("bob", "release", held)
    assert (refused.returncode, "alice" in refused.stderr) == (8, True), refused
    # Upgrade: each program of each host is restarted, standbys first, and the lease lives.
    for host in ("second", "first", "left"):
        for name, pid in children(running[host].pid).items():
            os.kill(pid, signal.SIGTERM)
            eventually_sync(lambda: children(running[host].pid).get(name, pid) != pid, timeout=60)  # noqa: B023
            eventually_sync(
                lambda: held in hosts.types("alice", "get", "reservations", "-o", "name").stdout, timeout=60
            )
    eventually_sync(lambda: "ONLINE" in hosts.types("alice", "get", "nodes").stdout, timeout=60)
    # Lose the process that leads: the other one does, and the lease is there still.
    eventually_sync(lambda: hosts.types("alice", "renew", held).returncode == 0, timeout=60)
    for name in ("gpuscale-allocator", "gpuscale-autoscaler", "gpuscale-gateway"):
        os.kill(children(running["first"].pid)[name], signal.SIGKILL)
    eventually_sync(lambda: hosts.types("alice", "renew", held).returncode == 0, timeout=60)
    # Revoke one person, and ask who did what.
    revoked = hosts.types(
        "bob", "token", "revoke", "bob", "--tokens-file", str(hosts.place / "first" / "tokens.toml")
    )
    assert revoked.returncode == 0, revoked.stderr
    (hosts.place / "second" / "tokens.toml").write_bytes((hosts.place / "first" / "tokens.toml").read_bytes())
    eventually_sync(lambda: "was revoked" in hosts.types("bob", "get", "nodes").stderr, timeout=60)
    assert "alice" in hosts.must("alice", "get", "reservations", "--gpu", "left/0", "--since", "1h")
    hosts.must("alice", "release", held)
