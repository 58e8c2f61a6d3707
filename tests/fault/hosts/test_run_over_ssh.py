"""`run` from a laptop: the command starts over the system's ssh on the host that was granted, as the Unix user that logs in there.

Real sshd and users of that host alone need real root, so that they are tested as root, as in CI.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.fault.hosts.lan import Lan
from tests.support.cli import Ran
from tests.support.up import CTL, ctl_environment
from tests.support.waiting import eventually_sync

LAPTOP, BETA, GAMMA = "laptop", "beta", "gamma"
PASSWD = "root:x:0:0::/root:/bin/bash\nsshd:x:100:65534::/run/sshd:/bin/false\nann:x:5001:5001::/home/ann:/bin/bash\nbob:x:5002:5002::/home/bob:/bin/bash\n"
SHADOW = "root:*:19000::::::\nsshd:*:19000::::::\nann:*:19000::::::\nbob:*:19000::::::\n"
# A /root and /run of its own; the interpreter may lie in /root, where other users must reach it.
FURNISH = """
set -e
hostname {name}
mount --bind {prefix} {folder}/python
mount -t tmpfs -o mode=755 none /root
mkdir -p {prefix} /root/.ssh
mount --bind {folder}/python {prefix}
mount -t tmpfs -o mode=755 none /run
mount -t tmpfs -o mode=755 none /home
mkdir -p /run/sshd /home/ann/.ssh /home/bob/.ssh
cp {folder}/key.pub /home/ann/.ssh/authorized_keys
cp {folder}/key.pub /home/bob/.ssh/authorized_keys
cp {folder}/key {folder}/known_hosts {folder}/config /root/.ssh/
chmod 600 /root/.ssh/*
chown -R 5001:5001 /home/ann
chown -R 5002:5002 /home/bob
mount --bind {folder}/passwd /etc/passwd
mount --bind {folder}/shadow /etc/shadow
mount --bind {folder}/hosts /etc/hosts
"""


def why_unavailable() -> str | None:
    missing = [
        tool for tool in ("ip", "unshare", "nsenter", "ssh", "ssh-keygen") if shutil.which(tool) is None
    ]
    if missing or not Path("/usr/sbin/sshd").exists():
        return f"no {missing[0] if missing else 'sshd'} (Debian packages iproute2, util-linux and openssh-server)"
    if os.geteuid() != 0:
        return "sshd logs users in as root alone"
    tried = subprocess.run(["unshare", "--net", "--mount", "--uts", "true"], check=False, capture_output=True)
    return None if tried.returncode == 0 else "no namespaces here, even as root"


class Desk:
    """A laptop, and the hosts beta and gamma that it may log in to as ann or bob."""

    def __init__(self, hosts: Lan, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self.address = f"{hosts.address(BETA)}:7070"

    def prepare(self) -> None:
        addresses = {name: self.hosts.address(name) for name in (BETA, GAMMA)}
        hosts = "".join(f"{address} {name}\n" for name, address in addresses.items())
        for name, text in (
            ("passwd", PASSWD),
            ("shadow", SHADOW),
            ("hosts", f"127.0.0.1 localhost\n{hosts}"),
        ):
            (self.folder / name).write_text(text)
        (self.folder / "python").mkdir()
        for key in ("key", "host_key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / key)], check=True
            )
        public = (self.folder / "host_key.pub").read_text()
        (self.folder / "known_hosts").write_text("".join(f"{name} {public}" for name in addresses))
        (self.folder / "config").write_text("IdentityFile /root/.ssh/key\nCheckHostIP no\n")
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        (self.folder / "sshd_config").write_text(
            f"HostKey {self.folder}/host_key\nUsePAM no\nPasswordAuthentication no\nSetEnv PATH={path}\n"
        )
        prefix = Path(sys.executable).resolve().parents[1]
        for name in (LAPTOP, *addresses):
            script = FURNISH.format(name=name, folder=self.folder, prefix=prefix)
            made = self.hosts.run(name, "sh", "-c", script)
            assert made.returncode == 0, made.stderr
        log = self.folder / "beta.log"
        for name in addresses:
            self.hosts.start(name, "/usr/sbin/sshd", "-D", "-e", "-f", f"{self.folder}/sshd_config", log=log)
        up = ("up", "--simulate", "2", "--listen", self.address, "--insecure-allow-remote")
        up = (*up, "--data-dir", str(self.folder / "data"))
        self.hosts.start(BETA, *CTL, *up, log=log, environment=ctl_environment())
        agent = (f"{Path(sys.executable).parent}/gpuscale-agent", "--source", "simulated", "--node", GAMMA)
        agent = (*agent, "--state-dir", str(self.folder / "agent"), "--fleet-address", self.address)
        agent = (*agent, "--simulated-gpu-count", "2", "--insecure-allow-remote")
        self.hosts.start(GAMMA, *agent, log=log, environment=ctl_environment())
        eventually_sync(lambda: self.ctl("get", "gpus").out.count(GAMMA) == 2, timeout=90.0)

    def ctl(self, *words: str) -> Ran:
        environment = ctl_environment(GPUSCALE_ADDRESS=self.address, HOME="/root")
        ran = self.hosts.run(LAPTOP, *CTL, *words, environment=environment)
        return Ran(ran.returncode, ran.stdout, ran.stderr)

    def run(self, *command: str, options: tuple[str, ...] = ()) -> Ran:
        where = () if "--members" in options else ("--node", BETA)
        more = ("--user", "ann", "--directory", "/home/ann", *where, *options)
        return self.ctl("run", "--gpus", "1", *more, "--", *command)

    def job(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.ctl("get", "job", name, "-o", "json").out)["job"]
        return found

    def running(self, pattern: str) -> list[str]:
        """The command lines of what runs on any host: they have one /proc."""
        return self.hosts.run(BETA, "sh", "-c", f"ps -eo args | grep '^{pattern}'").stdout.splitlines()

    def held(self) -> list[object]:
        found: list[object] = json.loads(self.ctl("get", "reservations", "-o", "json").out)["reservations"]
        return found


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    reason = why_unavailable()
    if reason is not None:
        pytest.skip(reason)
    folder = Path(tmp_path_factory.mktemp("desk"))
    for one in (folder, *folder.parents):
        if str(one).startswith("/tmp/"):
            one.chmod(0o755)
    hosts = Lan((LAPTOP, BETA, GAMMA), real=True)
    try:
        hosts.open()
        made = Desk(hosts, folder)
        made.prepare()
        yield made
    finally:
        hosts.close()
        if (log := folder / "beta.log").exists():
            print(log.read_text())


def test_a_command_runs_on_the_host_that_was_granted_as_the_user_who_logs_in(desk: Desk) -> None:
    ran = desk.run(
        "sh",
        "-c",
        "hostname; id -un; pwd; echo $CUDA_VISIBLE_DEVICES $MINE; exit 7",
        options=("--env", "MINE=1"),
    )
    host, user, directory, last = ran.out.splitlines()
    assert (host, user, directory, ran.code) == ("beta", "ann", "/home/ann", 7), ran.err
    assert last.startswith("SIM-")
    assert last.endswith(" 1")
    assert desk.held() == []


def test_nothing_is_started_where_the_directory_is_not_there(desk: Desk) -> None:
    ran = desk.run("touch", "/home/ann/ran", options=("--directory", "/nowhere"))
    assert "beta has no directory /nowhere" in ran.err
    assert (ran.code, desk.held()) == (4, [])


def test_nothing_is_held_where_ssh_cannot_log_in(desk: Desk) -> None:
    ran = desk.run("true", options=("--user", "root"))
    assert "no supervisor came up on beta" in ran.err
    assert (ran.code, desk.held()) == (7, [])


def test_standard_input_goes_to_the_command(desk: Desk) -> None:
    words = " ".join(
        [
            *CTL,
            "run",
            "--gpus",
            "1",
            "--node",
            BETA,
            "--user",
            "ann",
            "--directory",
            "/home/ann",
            "--",
            "wc",
            "-c",
        ]
    )
    environment = ctl_environment(GPUSCALE_ADDRESS=desk.address, HOME="/root")
    ran = desk.hosts.run(LAPTOP, "sh", "-c", f"head -c 300000 /dev/zero | {words}", environment=environment)
    assert (ran.returncode, ran.stdout.strip()) == (0, "300000"), ran.stderr


def test_a_command_ends_with_the_connection_and_its_gpus_are_given_back(desk: Desk) -> None:
    script = "echo $$ > /home/ann/pid; trap '' TERM; setsid sleep 7321 & sleep 7322 & wait; wait"
    words = (
        *CTL,
        "run",
        "--gpus",
        "1",
        "--node",
        BETA,
        "--ttl",
        "8s",
        "--user",
        "ann",
        "--directory",
        "/home/ann",
        "--",
    )
    environment = ctl_environment(GPUSCALE_ADDRESS=desk.address, HOME="/root")
    started = desk.hosts.start(
        LAPTOP, *words, "sh", "-c", script, log=desk.folder / "run.log", environment=environment
    )

    eventually_sync(lambda: len(desk.running("sleep 732")) == 2, timeout=30.0)
    started.kill()  # what it started, ssh, loses its pipes
    eventually_sync(lambda: desk.running("sleep 732") == [] and desk.held() == [], timeout=30.0)


DETACHED = ("-d", "--env", "CANARY=1")
TOKEN_OF = """
import sys
from gpuscale.api.allocator import v1 as api
from gpuscale.client import connect
with connect() as client:
    print(client.allocator.GetReservation(api.GetReservationRequest(name=f"reservations/{sys.argv[1]}")).lease_token)
"""


def test_a_detached_job_is_its_users_alone_and_shows_its_token_to_nobody(desk: Desk) -> None:
    script = "id -un; echo $CANARY; while [ ! -e /home/ann/go ]; do sleep 0.1; done; exit 3"
    started = desk.run("sh", "-c", script, options=(*DETACHED, "--name", "train"))
    assert started.code == 0, started.err
    name = started.out.strip()
    eventually_sync(lambda: desk.ctl("logs", "train").out == "ann\n1\n", timeout=30.0)
    kept = f"/home/ann/.local/state/gpuscale/jobs/{name}-0"
    bob = desk.hosts.run(
        LAPTOP, "ssh", "-l", "bob", BETA, f"cat {kept}/output", environment={"HOME": "/root"}
    )
    assert (bob.returncode, "Permission denied" in bob.stderr) == (1, True), bob.stderr
    environment = ctl_environment(GPUSCALE_ADDRESS=desk.address, HOME="/root")
    token = desk.hosts.run(
        LAPTOP, sys.executable, "-c", TOKEN_OF, name, environment=environment
    ).stdout.strip()
    assert len(token) == 43
    everywhere = (
        "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ /home/ann/.local/state/gpuscale/jobs/*/* 2>/dev/null"
    )
    peeked = desk.hosts.run(BETA, "sh", "-c", f"{everywhere} | tr '\\0' '\\n'").stdout
    assert f"supervise\n--job\n{name}-0" in peeked
    shown = [desk.ctl("get", kind, "-o", "json", "-a").out for kind in ("jobs", "reservations")]
    log = (desk.folder / "beta.log").read_text()
    assert [one for one in (peeked, started.err, log, *shown) if token in one] == []
    desk.hosts.run(BETA, "touch", "/home/ann/go")
    assert desk.ctl("attach", name).code == 3
    assert desk.job(name)["state"] == "STATE_FAILED"


def test_a_detached_job_is_stopped_over_ssh_with_all_that_it_started(desk: Desk) -> None:
    script = "trap '' TERM; setsid sleep 7421 & sleep 7422 & wait; wait"
    name = desk.run("sh", "-c", script, options=(*DETACHED, "--ttl", "8s")).out.strip()
    eventually_sync(lambda: len(desk.running("sleep 742")) == 2, timeout=30.0)
    stopped = desk.ctl("stop", name)
    assert stopped.code == 0, stopped.err
    assert (desk.running("sleep 742"), desk.job(name)["state"], desk.held()) == ([], "STATE_STOPPED", [])


MEMBERS = ("--members", "2", "--strategy", "strict-spread")
MEET = f"{sys.executable} {Path(__file__).with_name('meet.py')}"


def test_members_on_two_hosts_meet_at_the_first(desk: Desk) -> None:
    ran = desk.run("sh", "-c", f"hostname; exec {MEET}", options=MEMBERS)
    assert ran.code == 0, ran.err
    of = {
        number: [one[4:] for one in ran.out.splitlines() if one.startswith(f"[{number}] ")]
        for number in (0, 1)
    }
    assert {of[0][0], of[1][0]} == {BETA, GAMMA}
    assert (of[0][1:], of[1][1:]) == (["0 of 2 heard 1"], ["1 of 2 heard 1"])


@pytest.mark.parametrize("how", [(), ("-d",)], ids=["attached", "detached"])
def test_a_member_that_is_killed_stops_the_others_at_once(desk: Desk, how: tuple[str, ...]) -> None:
    script = "if [ $NODE_RANK = 1 ]; then sleep 1; kill -9 $$; fi; setsid sleep 7431 & sleep 7432"
    ran = desk.run("sh", "-c", script, options=(*MEMBERS, *how, "--name", "pair"))
    code = desk.ctl("wait", ran.out.strip()).code if how else ran.code
    assert code == 137, ran.err
    stopped, killed = desk.job("pair")["members"]
    assert stopped["endReason"] == "member 1 ended with 137"
    ended = [datetime.fromisoformat(one["endTime"]) for one in (killed, stopped)]
    assert (ended[1] - ended[0]).total_seconds() < 5
    assert (desk.running("sleep 743"), desk.held()) == ([], [])


def test_a_port_is_forwarded_while_the_command_runs(desk: Desk) -> None:
    server = "import socket; s = socket.create_server(('127.0.0.1', 8123)); s.accept()[0].sendall(b'here'); "
    words = (*CTL, "run", "--gpus", "1", "--node", BETA, "--user", "ann", "--directory", "/home/ann")
    environment = ctl_environment(GPUSCALE_ADDRESS=desk.address, HOME="/root")
    log = desk.folder / "forward.log"
    command = ("--forward", "8123", "--", sys.executable, "-c", server)
    running = desk.hosts.start(LAPTOP, *words, *command, log=log, environment=environment)
    ask = "import socket; print(socket.create_connection(('127.0.0.1', 8123)).recv(9).decode(), end='')"
    eventually_sync(lambda: desk.hosts.run(LAPTOP, sys.executable, "-c", ask).stdout == "here", timeout=30.0)
    assert running.wait(30) == 0, log.read_text()
