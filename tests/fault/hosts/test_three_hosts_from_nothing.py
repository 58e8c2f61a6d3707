"""Three hosts, from nothing to mutual TLS with a standby and two users, in six commands; then a year of an operator's in minutes.

The year: add a host, restart for an upgrade, lose the leaders, drain, rotate, revoke, back up and restore, who and why. What needs
no site has tests of its own: rotation of an authority (contract/cli/test_tokens_and_certs), a revoked certificate
(integration/common/test_revoked_certificates), units (test_units_of_init_and_join), what a backup misses
(integration/allocator/test_on_postgresql).
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest

from gpuscale.common.security.certificates import read_certificate
from tests.fault.hosts.lan import ROOT, Lan, lan, why_unavailable
from tests.support.nvml_double import NvmlDouble, env_with_double
from tests.support.nvml_double import why_unavailable as why_no_double
from tests.support.postgresql import PostgresServer, program
from tests.support.postgresql import why_unavailable as why_no_database
from tests.support.up import CTL, ctl_environment
from tests.support.waiting import eventually_sync

LINE = re.compile(
    r"^gpuscalectl (join 10\.77\.0\.1:7070,10\.77\.0\.2:7070 --token \S+ --ca-hash sha256:\S+)( --role standby .* URL)?$",
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
        self.ran = dict[str, tuple[str, ...]]()
        self.variables = dict[str, dict[str, str]]()

    def starts(self, host: str, *words: str) -> "subprocess.Popen[bytes]":
        """Type a command that goes on."""
        self.typed += 1
        if not (place := self.place / f"double-{host}").exists():
            place.mkdir()
            double = NvmlDouble(place)
            for index, gpu in enumerate(double.gpus):
                gpu.uuid = f"GPU-{host}-{index}"
            double.write()
            self.variables[host] = env_with_double(double)
        self.ran[host] = words
        words = (*CTL, *words, "--dir", str(self.place / host))
        log = self.place / f"{host}.log"
        return self.network.start(host, *words, log=log, environment=self.variables[host])

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

    def at(self, who: str, address: str) -> tuple[str, ...]:
        """Options by which a person calls one gateway, and no other."""
        files = {"--ca-file": "lab.ca.crt", "--token-file": "lab.token"}
        own = (word for option, name in files.items() for word in (option, str(self.place / who / name)))
        return ("--address", f"{address}:7070", *own)

    def certificate(self, address: str) -> str:
        """What the gateway there shows."""
        ask = f"import ssl; print(ssl.get_server_certificate(('{address}', 7070)))"
        return self.network.run("right", sys.executable, "-c", ask).stdout

    def must(self, who: str, *words: str) -> str:
        ran = self.types(who, *words)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout


NEEDED = why_unavailable() or why_no_double() or why_no_database()


@pytest.mark.timeout(480)
@pytest.mark.skipif(bool(NEEDED), reason=str(NEEDED))
def test_three_hosts_from_nothing(tmp_path: Path) -> None:
    with PostgresServer() as database, lan("first", "second", "left", "right", "edge") as network:
        sockets = database.run("SHOW unix_socket_directories")[0][0]
        Path(str(sockets)).chmod(0o755)  # the way to it from other namespaces
        url = f"{database.database().reveal()}?host={sockets}"
        hosts, began = Hosts(network, tmp_path), time.monotonic()
        standby = ("--standby", "10.77.0.2", "--postgresql", url)
        first = hosts.starts("first", "init", "--host", "10.77.0.1", *standby, "--run")
        eventually_sync(lambda: len(hosts.said("first", LINE)) == 2, timeout=90)
        [(of_gpus, _), (of_standby, more)] = hosts.said("first", LINE)
        second = hosts.starts("second", *f"{of_standby}{more}".replace("URL", url).split(), "--run")
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
        running = {"first": first, "second": second, "left": left}
        _year(hosts, running, database)
        for process in running.values():
            process.terminate()
        assert [process.wait(60) for process in running.values()] == [0] * 5


class Messages:
    """What the worker of `worker.py` takes, one after the other; `endpoint` is what starts one, on a host with `template`."""

    endpoint = """kind: Endpoint
name: jobs
spec:
  minReplicas: 1
  maxReplicas: 1
  tick: 0.5s
  template: {template: worker, gpuCount: 1, drainTimeout: 20s}
"""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.sent = 0
        for name in ("new", "taken"):
            (place / name).mkdir(parents=True)
        (place / "done").touch()
        command = [sys.executable, "-m", "tests.fault.hosts.worker", str(place)]
        self.template = (
            f"\n[templates.worker]\ncommand = {json.dumps(command)}\nworking_dir = {json.dumps(str(ROOT))}\n"
        )

    def send(self, count: int) -> None:
        for number in range(self.sent, self.sent + count):
            (self.place / "new" / f"{number:06}").touch()
        self.sent += count

    def done(self) -> list[tuple[str, str]]:
        """Who did each, by GPU and process; none twice."""
        lines = [line.split() for line in (self.place / "done").read_text().splitlines()]
        assert len({one[0] for one in lines}) == len(lines)
        return [(gpu, process) for _, gpu, process in lines]

    def next_by(self, gpus: str) -> str:
        """Wait until one more is done on such a GPU; by which process."""
        before = len(self.done())
        eventually_sync(lambda: [one for one in self.done()[before:] if one[0].startswith(gpus)], timeout=60)
        return self.done()[-1][1]


def _year(hosts: Hosts, running: "dict[str, subprocess.Popen[bytes]]", database: PostgresServer) -> None:
    """Each with a worker that is at work, and at first a lease, which live through all of it."""
    ours = {host: children(process.pid) for host, process in running.items()}
    assert (ours["first"].keys(), ours["second"].keys()) == (PROGRAMS, PROGRAMS - {"gpuscale-fleet"})
    messages = Messages(hosts.place / "messages")
    messages.send(3000)
    _add(hosts, running, messages)
    held = hosts.must(
        *("alice", "reserve", "--gpus", "1", "--ttl", "10m", "--max-utilization", "100", "-o", "name")
    ).strip()
    refused = hosts.types("bob", "release", held)
    assert (refused.returncode, "alice" in refused.stderr) == (8, True), refused
    worker = messages.next_by("GPU-")
    _upgrade(hosts, running, held)
    _lose(hosts, running, held)
    assert messages.next_by("GPU-") == worker
    assert "alice" in hosts.must("alice", "get", "reservations", "--gpu", "left/0", "--since", "1h")
    hosts.must("alice", "release", held)
    _drain(hosts, messages, worker)
    _rotate(hosts, messages)
    _revoke(hosts, running)
    _restore(hosts, running, messages, database)
    hosts.must("alice", "delete", "endpoint", "jobs", "--yes")
    eventually_sync(lambda: hosts.must("alice", "get", "replicas", "-o", "name") == "", timeout=60)
    assert len(messages.done()) == len([*(messages.place / "taken").iterdir()])  # none was left half done


def _add(hosts: Hosts, running: "dict[str, subprocess.Popen[bytes]]", messages: Messages) -> None:
    """A host more, by two commands; what may run on both is added to their settings, which join leaves alone."""
    made = json.loads(hosts.must("admin", "join-token", "create", "-o", "json"))
    line = ("join", "10.77.0.1:7070,10.77.0.2:7070", "--token", made["token"], "--ca-hash", made["caHash"])
    assert hosts.starts("right", *line, "--node", "right").wait(60) == 0
    for host in ("left", "right"):
        with (hosts.place / host / "gpuscale.toml").open("a") as settings:
            settings.write(messages.template)
    os.kill(children(running["left"].pid)["gpuscale-adapter"], signal.SIGTERM)
    running["right"] = hosts.starts("right", *line[:2], *line[4:], "--node", "right", "--run")
    eventually_sync(partial(hosts.said, "right", "right is ONLINE"), timeout=60)
    eventually_sync(lambda: hosts.must("alice", "get", "adapters").count("CONNECTED") == 2, timeout=60)
    (manifest := hosts.place / "jobs.yaml").write_text(messages.endpoint)
    hosts.must("alice", "apply", "-f", str(manifest))


def _upgrade(hosts: Hosts, running: "dict[str, subprocess.Popen[bytes]]", held: str) -> None:
    """Each program of each host is restarted, standbys first, and the lease and the worker live."""
    for host in ("second", "first", "left", "right"):
        for name, pid in children(running[host].pid).items():
            os.kill(pid, signal.SIGTERM)
            eventually_sync(lambda: children(running[host].pid).get(name, pid) != pid, timeout=60)  # noqa: B023
            eventually_sync(
                lambda: held in hosts.types("alice", "get", "reservations", "-o", "name").stdout, timeout=60
            )
    eventually_sync(lambda: hosts.types("alice", "get", "nodes").stdout.count("ONLINE") == 2, timeout=60)


def _lose(hosts: Hosts, running: "dict[str, subprocess.Popen[bytes]]", held: str) -> None:
    """The processes that lead: the others do, and the lease is there still."""
    eventually_sync(lambda: hosts.types("alice", "renew", held).returncode == 0, timeout=60)
    for name in ("gpuscale-allocator", "gpuscale-autoscaler", "gpuscale-gateway"):
        os.kill(children(running["first"].pid)[name], signal.SIGKILL)
    eventually_sync(lambda: hosts.types("alice", "renew", held).returncode == 0, timeout=60)


def _drain(hosts: Hosts, messages: Messages, worker: str) -> None:
    """The host with the worker: another starts on the other host, the old one finishes its message and goes. And why."""
    here = messages.done()[-1][0].split("-")[1]
    there = {"left": "right", "right": "left"}[here]
    hosts.must("admin", "drain", here, "--grace", "10m", "--reason", "new kernel")
    assert messages.next_by(f"GPU-{there}") != worker
    moved = datetime.now(UTC).isoformat()
    eventually_sync(lambda: not Path(f"/proc/{worker}").exists(), timeout=30)
    hosts.must("admin", "uncordon", here)
    why = hosts.must("alice", "explain", "endpoint", "jobs", "--at", moved)
    assert f"nodes/{here} is drained: new kernel" in why


def _rotate(hosts: Hosts, messages: Messages) -> None:
    """The admin's token, whose old secret counts beside the new one, and the certificates of the services."""
    first = hosts.place / "first"
    words = ("token", "rotate", "admin", "--tokens-file", str(first / "tokens.toml"), "--write")
    for new in ("new.token", "admin.token"):  # the admin goes on with the old one in between
        hosts.must("admin", *words, str(first / new))
    shown = hosts.certificate("10.77.0.1")
    hosts.must("admin", "certs", "renew", "server", "services", "gate", "--dir", str(first / "pki"))
    eventually_sync(lambda: hosts.certificate("10.77.0.1") != shown, timeout=30)
    eventually_sync(lambda: hosts.types("admin", "get", "nodes").returncode == 0, timeout=30)
    messages.next_by("GPU-")


def _edge(hosts: Hosts, running: "dict[str, subprocess.Popen[bytes]]") -> tuple[str, ...]:
    """A gateway of its own: users call it with their tokens. How to reach it and nothing else."""
    created = ("join-token", "create", "--kind", "gateway", "--node", "edge", "-o", "json")
    made = json.loads(hosts.must("admin", *created))
    line = ("join", "10.77.0.1:7070,10.77.0.2:7070", "--token", made["token"], "--ca-hash", made["caHash"])
    as_gateway = ("--role", "gateway", "--node", "edge", "--host", "10.77.0.5", "--run")
    running["edge"] = hosts.starts("edge", *line, *as_gateway)
    eventually_sync(partial(hosts.said, "edge", "edge serves as gateway"), timeout=60)
    assert children(running["edge"].pid).keys() == {"gpuscale-gateway"}
    where = hosts.at("bob", "10.77.0.5")
    assert "left" in hosts.must("bob", *where, "get", "nodes")
    return where


def _revoke(hosts: Hosts, running: "dict[str, subprocess.Popen[bytes]]") -> None:
    """One person, on the first host alone: the others refuse it in seconds. They have had their own certificates renewed."""
    edge, tokens = _edge(hosts, running), hosts.place / "first" / "tokens.toml"
    hosts.must("bob", "token", "revoke", "bob", "--tokens-file", str(tokens))
    began = time.monotonic()
    for where in (edge, hosts.at("bob", "10.77.0.2")):
        asked = partial(hosts.types, "bob", *where, "get", "nodes")
        eventually_sync(lambda ask=asked: "was revoked" in ask().stderr, timeout=60)
    assert time.monotonic() - began < 30
    for host, address in (("second", "10.77.0.2"), ("edge", "10.77.0.5")):
        kept = hosts.place / host / "state/host"
        assert (kept / "tokens.toml").read_bytes() == tokens.read_bytes()
        life = read_certificate(hosts.certificate(address).encode())
        assert life.ends - time.time() < 8 * 86400, host


def _restore(
    hosts: Hosts,
    running: "dict[str, subprocess.Popen[bytes]]",
    messages: Messages,
    database: PostgresServer,
) -> None:
    """As docs/operations.md says, into another database, while the worker goes on."""
    worker, copy, other = messages.next_by("GPU-"), hosts.place / "gpuscale.sql", database.database()
    named, sockets = (hosts.place / "first/database.url").read_text().split("?")
    saved = [str(program("pg_dump")), "-n", "allocator", "-n", "autoscaler", "-f", str(copy), named]
    subprocess.run(saved, check=True, timeout=60)
    for host in ("first", "second"):
        running[host].terminate()
        assert running[host].wait(60) == 0
        settings = hosts.place / host / "gpuscale.toml"
        settings.write_text(
            settings.read_text().replace("[allocator]", "[allocator]\nfences_above = 1000000")
        )
    loaded = [
        str(program("psql")),
        "-v",
        "ON_ERROR_STOP=1",
        "-q",
        "-o",
        "/dev/null",
        "-f",
        str(copy),
        other.reveal(),
    ]
    subprocess.run(loaded, check=True, timeout=60)
    for host in ("first", "second"):
        (hosts.place / host / "database.url").write_text(f"{other.reveal()}?{sockets}")
        running[host] = hosts.starts(host, *hosts.ran[host])
    eventually_sync(lambda: hosts.types("alice", "get", "reservations").stdout.count("jobs") == 1, timeout=60)
    ask = ("reserve", "--gpus", "1", "--max-utilization", "100", "-o", "jsonpath={.fence}")
    fence = eventually_sync(lambda: hosts.types("alice", *ask).stdout, timeout=60)
    assert int(fence) > 1000000
    assert messages.next_by("GPU-") == worker
