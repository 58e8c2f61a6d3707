"""Three hosts, from nothing to mutual TLS with a standby and two users, in six commands; then a year of an operator's in minutes.

Each host has an /etc, a /var/lib and processes of its own, root types on it, and programs run as the users that packages make. The two
users log in from their own homes.

The year: add a host, restart for an upgrade, lose the leaders, drain, revoke, back up and restore, who and why. What needs
no site has tests of its own: rotation of tokens, certificates and their authority (contract/cli/test_tokens_and_certs), a revoked
certificate (integration/common/test_tls), units (test_units_of_init_and_join), what a backup misses
(integration/allocator/test_on_postgresql).
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest

from gpuscale.common.security.certificates import read_certificate
from tests.support.cli import Ran
from tests.support.fixtures import need
from tests.support.hosts import ROOT, Hosts, Running, children, why_unavailable
from tests.support.lab import PATIENT, double
from tests.support.nvml_double import why_unavailable as why_no_double
from tests.support.nvml_double.build import library_folder
from tests.support.postgresql import PostgresServer, program
from tests.support.postgresql import why_unavailable as why_no_database
from tests.support.waiting import eventually_sync

LINE = re.compile(
    r"^gpuscalectl (join first:7070,second:7070 --token \S+ --ca-hash sha256:\S+)( --role standby .* URL)?$",
    re.MULTILINE,
)
ADMIN = re.compile(r"for admins: gpuscalectl (.*)")
PROGRAMS = {"gpuscale-fleet", "gpuscale-allocator", "gpuscale-autoscaler", "gpuscale-gateway"}
USERS = ("ann", "bob")
COMMANDS, MINUTES = 6, 3


class Site:
    """The hosts, and what is typed on them."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.typed = 0
        self.running = dict[str, Running]()
        self.ran = dict[str, tuple[str, ...]]()
        self._admin: tuple[str, ...] = ()

    def starts(self, host: str, *words: str, place: str = "") -> Running:
        """Root types a command that goes on."""
        self.typed += 1
        folder = self.hosts.folder / f"double-{host}"
        if not folder.exists():
            for user in ("gpuscale", "gpuscale-worker"):
                self.hosts.run(host, "useradd", "--system", "--shell", "/usr/sbin/nologin", user)
        environment = {**double(folder, host), **PATIENT}
        log = f"{place or host}.log"
        started = self.hosts.start(host, "gpuscalectl", *words, log=log, environment=environment)
        self.running[place or host], self.ran[place or host] = started, words
        return started

    def programs(self, place: str) -> dict[str, int]:
        """What `init` or `join` runs there: pids by name, as seen from here."""
        [pid] = children(self.running[place].process.pid)
        found: dict[str, int] = {}
        for one in children(pid):
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
                words = Path(f"/proc/{one}/cmdline").read_text().split("\0")
                if len(words) > 1:  # a zombie has none
                    found[Path(words[1]).name] = one
        return found

    def said(self, place: str, line: str | re.Pattern[str]) -> list[tuple[str, ...]]:
        return re.findall(line, (self.hosts.folder / f"{place}.log").read_text())

    def types(self, who: str, *words: str, stdin: str = "") -> Ran:
        """A person types a command at home, or the admin, as root of the first host."""
        self.typed += 1
        if who == "admin":
            self._admin = self._admin or tuple(str(self.said("first", ADMIN)[0]).split())
            words, where = (*self._admin, *words), ("first", "root")
        else:
            where = (dict(zip(USERS, ("left", "second"), strict=True))[who], who)
        if self.typed > COMMANDS:
            return self.hosts.ctl(where[0], *words, user=where[1])
        return self.hosts.run(where[0], "gpuscalectl", *words, user=where[1], stdin=stdin)

    def at(self, who: str, address: str) -> tuple[str, ...]:
        """Options by which a person calls one gateway, and no other."""
        files = {"--ca-file": "first.ca.crt", "--token-file": "first.token"}
        own = [(option, f"/home/{who}/.config/gpuscale/{name}") for option, name in files.items()]
        return ("--address", address, *own[0], *own[1])

    def certificate(self, host: str) -> str:
        """What a gateway shows."""
        ask = f"import ssl; print(ssl.get_server_certificate(('{host}', 7070)))"
        return self.hosts.run("left", sys.executable, "-c", ask).out

    def must(self, who: str, *words: str, stdin: str = "") -> str:
        ran = self.types(who, *words, stdin=stdin)
        assert ran.code == 0, ran.err
        return ran.out


@pytest.mark.timeout(480)
def test_three_hosts_from_nothing(tmp_path: Path) -> None:
    need(why_unavailable() or why_no_double() or why_no_database())
    with PostgresServer() as database:
        sockets = Path(str(database.run("SHOW unix_socket_directories")[0][0]))
        for folder in (sockets, library_folder()):
            folder.chmod(0o755)  # the way to it for users of the hosts
        url = f"{database.database().reveal()}?host={sockets}"
        names = ("first", "second", "left", "right")
        with Hosts(names, tmp_path, shared=(sockets, library_folder())) as hosts:
            site, began = Site(hosts), time.monotonic()
            _six_commands(site, url)
            assert (site.typed, time.monotonic() - began < MINUTES * 60) == (COMMANDS, True)
            _year(site, database)
            for one in site.running.values():
                one.kill(signal.SIGTERM)
            assert [one.wait() for one in site.running.values()] == [0] * 5


def _six_commands(site: Site, url: str) -> None:
    """As docs/deploy.md has them."""
    site.starts("first", "init", "--host", "first", "--standby", "second", "--postgresql", url, "--run")
    eventually_sync(lambda: len(site.said("first", LINE)) == 2, timeout=170)
    [(of_gpus, _), (of_standby, more)] = site.said("first", LINE)
    site.starts("second", *f"{of_standby}{more}".replace("URL", url).split(), "--run")
    site.starts("left", *of_gpus.split(), "--run")
    made = site.must("admin", "login-code", "create", *USERS, "--role", "operator", "-o", "json")
    for one in json.loads(made)["codes"]:
        said = site.must(one["name"], *one["type"].split()[1:], stdin=f"{one['code']}\n")
        assert f"logged in as {one['name']} (operator)" in said
    eventually_sync(partial(site.said, "left", "left is ONLINE"), timeout=170)
    eventually_sync(partial(site.said, "second", "serves as standby"), timeout=170)


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
            (place / name).chmod(0o777)
        (place / "done").touch()
        (place / "done").chmod(0o666)
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

    def next_by(self, gpus: str) -> tuple[str, str]:
        """Wait until one more is done on such a GPU; by whom."""
        self.send(50)  # the first ones last for a quick machine
        before = len(self.done())
        eventually_sync(
            lambda: [one for one in self.done()[before:] if one[0].startswith(gpus)], timeout=60, interval=0.5
        )
        return self.done()[-1]


def _year(site: Site, database: PostgresServer) -> None:
    """Each with a worker that is at work, and at first a lease, which live through all of it."""
    assert site.programs("first").keys() == PROGRAMS
    assert site.programs("second").keys() == PROGRAMS - {"gpuscale-fleet"}
    messages = Messages(site.hosts.folder / "messages")
    messages.send(3000)
    _add(site, messages)
    site.must("admin", "doctor")  # nothing is FAIL
    assert "this user may not read it" in site.types("ann", "doctor", "--only", "host").out
    ask = ["reserve", "--gpus", "1", "--ttl", "10m", "--max-utilization", "100", "-o", "name"]
    held = site.must("ann", *ask).strip()
    refused = site.types("bob", "release", held)
    assert (refused.code, "ann" in refused.err) == (8, True), refused
    worker = messages.next_by("GPU-")
    _upgrade(site, held)
    assert messages.next_by("GPU-") == worker
    _lose(site, held)
    assert messages.next_by("GPU-") == worker
    assert "ann" in site.must("ann", "get", "reservations", "--gpu", "left/0", "--since", "1h")
    site.must("ann", "release", held)
    _drain(site, messages, worker)
    _revoke(site)
    _restore(site, messages, database)
    site.must("ann", "delete", "endpoint", "jobs", "--yes")
    eventually_sync(lambda: site.must("ann", "get", "replicas", "-o", "name") == "", timeout=60, interval=0.5)
    assert len(messages.done()) == len([*(messages.place / "taken").iterdir()])  # none was left half done
    assert not site.said("left", "no agent admits") + site.said("right", "no agent admits")


def _join_line(site: Site, *options: str) -> list[str]:
    made = json.loads(site.must("admin", "join-token", "create", *options, "-o", "json"))
    return ["join", "first:7070,second:7070", "--token", made["token"], "--ca-hash", made["caHash"]]


def _add(site: Site, messages: Messages) -> None:
    """A host more, by two commands; what may run on both is added to their settings, which join leaves alone."""
    line = _join_line(site)
    assert site.starts("right", *line).wait() == 0
    for host in ("left", "right"):
        with (site.hosts.root(host) / "etc/gpuscale/gpuscale.toml").open("a") as settings:
            settings.write(messages.template)
    os.kill(site.programs("left")["gpuscale-adapter"], signal.SIGTERM)
    site.starts("right", *line[:2], *line[4:], "--run")
    eventually_sync(partial(site.said, "right", "right is ONLINE"), timeout=60, interval=0.5)
    eventually_sync(
        lambda: site.must("ann", "get", "adapters").count("CONNECTED") == 2, timeout=60, interval=0.5
    )
    (manifest := site.hosts.folder / "jobs.yaml").write_text(messages.endpoint)
    site.must("ann", "apply", "-f", str(manifest))


def _upgrade(site: Site, held: str) -> None:
    """The programs of each host are restarted in the order of the plan, and the lease and the worker live."""
    planned = site.must("admin", "upgrade", "--plan")
    for gateway in ("first:7070", "second:7070"):
        assert re.search(rf"OK +{gateway} +its gateway is {version('gpuscale')}", planned), planned
    for hosts in (("second",), ("first",), ("left", "right")):
        before = {(host, *one) for host in hosts for one in site.programs(host).items()}
        for *_, pid in before:
            os.kill(pid, signal.SIGTERM)

        def restarted(before: set[tuple[str, str, int]] = before) -> bool:
            now = {(host, name): pid for host, *_ in before for name, pid in site.programs(host).items()}
            return all(now.get((host, name), pid) != pid for host, name, pid in before)

        eventually_sync(restarted, timeout=60, interval=0.1)
        listed = partial(site.types, "ann", "get", "reservations", "-o", "name")
        eventually_sync(lambda ask=listed: held in ask().out, timeout=60, interval=0.5)
    eventually_sync(
        lambda: site.types("ann", "get", "nodes").out.count("ONLINE") == 2, timeout=60, interval=0.5
    )


def _lose(site: Site, held: str) -> None:
    """The processes that lead: the others do, and the lease is there still."""
    eventually_sync(lambda: site.types("ann", "renew", held).code == 0, timeout=60, interval=0.5)
    told = json.loads(site.must("admin", "version", "-o", "json"))["versions"]
    leading = {one["name"]: re.findall(r"process that leads, (\w+):", one["program"]) for one in told}
    for name in ("allocator", "autoscaler"):
        [host] = leading[name]
        os.kill(site.programs(host)[f"gpuscale-{name}"], signal.SIGKILL)
    eventually_sync(lambda: site.types("ann", "renew", held).code == 0, timeout=60, interval=0.5)


def _drain(site: Site, messages: Messages, worker: tuple[str, str]) -> None:
    """The host with the worker: another starts on the other host, the old one finishes its message and goes. And why."""
    here = worker[0].split("-")[1]
    there = {"left": "right", "right": "left"}[here]
    site.must("admin", "drain", here, "--grace", "10m", "--reason", "new kernel")
    asked, because = ("explain", "endpoint", "jobs"), f"nodes/{here} is drained: new kernel"

    def decided() -> list[datetime]:
        found = json.loads(site.must("ann", *asked, "--last", "20", "-o", "json"))["decisions"]
        return [datetime.fromisoformat(one["createTime"]) for one in found if because in json.dumps(one)]

    then = eventually_sync(decided, interval=0.1)[0] + timedelta(milliseconds=1)
    messages.next_by(f"GPU-{there}")
    eventually_sync(lambda: not (site.hosts.root(here) / "proc" / worker[1]).exists())
    site.must("admin", "uncordon", here)
    assert because in site.must("ann", *asked, "--at", then.isoformat())


def _edge(site: Site) -> tuple[str, ...]:
    """A gateway of its own, on a GPU host: users call it with their tokens. How to reach it and nothing else."""
    line = _join_line(site, "--kind", "gateway", "--node", "edge")
    where = ("--node", "edge", "--host", "right", "--dir", "/etc/gpuscale-edge")
    site.starts("right", *line, "--role", "gateway", *where, "--run", place="edge")
    eventually_sync(partial(site.said, "edge", "edge serves as gateway"), timeout=60, interval=0.5)
    assert site.programs("edge").keys() == {"gpuscale-gateway"}
    reached = site.at("bob", "right:7070")
    assert "left" in site.must("bob", *reached, "get", "nodes")
    return reached


def _revoke(site: Site) -> None:
    """One person, on the first host alone: the others refuse it in seconds. They have had their own certificates renewed."""
    edge, tokens = _edge(site), site.hosts.root("first") / "etc/gpuscale/tokens.toml"
    site.must("admin", "token", "revoke", "bob", "--tokens-file", "/etc/gpuscale/tokens.toml")
    began = time.monotonic()
    for where in (edge, site.at("bob", "second:7070")):
        asked = partial(site.types, "bob", *where, "get", "nodes")
        eventually_sync(lambda ask=asked: "was revoked" in ask().err, timeout=60, interval=0.5)
    assert time.monotonic() - began < 60
    for host, kept in (("second", "var/lib/gpuscale/host"), ("right", "etc/gpuscale-edge/state/host")):
        own = site.hosts.root(host) / kept / "tokens.toml"
        eventually_sync(lambda own=own: own.read_bytes() == tokens.read_bytes())
        life = read_certificate(site.certificate(host).encode())
        assert life.ends - time.time() < 8 * 86400, host


def _restore(site: Site, messages: Messages, database: PostgresServer) -> None:
    """As docs/operations.md says, into another database, while the worker goes on."""
    worker, copy, other = messages.next_by("GPU-"), site.hosts.folder / "gpuscale.sql", database.database()
    settings = {host: site.hosts.root(host) / "etc/gpuscale" for host in ("first", "second")}
    named, sockets = (settings["first"] / "database.url").read_text().split("?")
    saved = [str(program("pg_dump")), "-n", "allocator", "-n", "autoscaler", "-f", str(copy), named]
    subprocess.run(saved, check=True, timeout=60)
    quietly = ("-v", "ON_ERROR_STOP=1", "-q", "-o", "/dev/null")
    loading = [str(program("psql")), *quietly, "-f", str(copy), other.reveal()]
    subprocess.run(loading, check=True, timeout=60)
    for host in settings:
        site.running[host].kill(signal.SIGTERM)
    for host, folder in settings.items():
        assert site.running[host].wait() == 0
        with_fences = (folder / "gpuscale.toml").read_text()
        with_fences = with_fences.replace("[allocator]", "[allocator]\nfences_above = 1000000")
        (folder / "gpuscale.toml").write_text(with_fences)
        (folder / "database.url").write_text(f"{other.reveal()}?{sockets}")
    for host in settings:
        site.starts(host, *site.ran[host])
    eventually_sync(
        lambda: site.types("ann", "get", "reservations").out.count("jobs") == 1, timeout=60, interval=0.5
    )
    ask = ("reserve", "--gpus", "1", "--max-utilization", "100", "-o", "jsonpath={.fence}")
    fence = eventually_sync(lambda: site.types("ann", *ask).out, timeout=60, interval=0.5)
    assert int(fence) > 1000000
    assert messages.next_by("GPU-") == worker
