"""`run` from a laptop: the command starts over the system's ssh on the host that was granted, as the Unix user that logs in there.

Real sshd and users of that host alone need real root, so that they are tested as root, as in CI.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.hosts.lan import Lan
from tests.support.cli import Ran
from tests.support.up import CTL, ctl_environment
from tests.support.waiting import eventually_sync

LAPTOP, BETA = "laptop", "beta"
PASSWD = "root:x:0:0::/root:/bin/bash\nsshd:x:100:65534::/run/sshd:/bin/false\nann:x:5001:5001::/home/ann:/bin/bash\n"
SHADOW = "root:*:19000::::::\nsshd:*:19000::::::\nann:*:19000::::::\n"
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
mkdir -p /run/sshd /home/ann/.ssh
cp {folder}/key.pub /home/ann/.ssh/authorized_keys
cp {folder}/key {folder}/known_hosts {folder}/config /root/.ssh/
chmod 600 /root/.ssh/*
chown -R 5001:5001 /home/ann
mount --bind {folder}/passwd /etc/passwd
mount --bind {folder}/shadow /etc/shadow
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
    """A laptop, and the host beta that it may log in to as ann."""

    def __init__(self, hosts: Lan, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self.address = f"{hosts.address(BETA)}:7070"

    def prepare(self) -> None:
        for name, text in (("passwd", PASSWD), ("shadow", SHADOW)):
            (self.folder / name).write_text(text)
        (self.folder / "python").mkdir()
        for key in ("key", "host_key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / key)], check=True
            )
        there = self.hosts.address(BETA)
        public = (self.folder / "host_key.pub").read_text()
        (self.folder / "known_hosts").write_text(f"{there} {public}")
        (self.folder / "config").write_text(f"Host beta\n  HostName {there}\n  IdentityFile /root/.ssh/key\n")
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        (self.folder / "sshd_config").write_text(
            f"HostKey {self.folder}/host_key\nUsePAM no\nPasswordAuthentication no\nSetEnv PATH={path}\n"
        )
        prefix = Path(sys.executable).resolve().parents[1]
        for name in (LAPTOP, BETA):
            script = FURNISH.format(name=name, folder=self.folder, prefix=prefix)
            made = self.hosts.run(name, "sh", "-c", script)
            assert made.returncode == 0, made.stderr
        log = self.folder / "beta.log"
        self.hosts.start(BETA, "/usr/sbin/sshd", "-D", "-e", "-f", f"{self.folder}/sshd_config", log=log)
        up = ("up", "--simulate", "2", "--listen", self.address, "--insecure-allow-remote")
        up = (*up, "--data-dir", str(self.folder / "data"))
        self.hosts.start(BETA, *CTL, *up, log=log, environment=ctl_environment())
        eventually_sync(lambda: "beta" in self.ctl("get", "gpus").out, timeout=90.0)

    def ctl(self, *words: str) -> Ran:
        environment = ctl_environment(GPUSCALE_ADDRESS=self.address, HOME="/root")
        ran = self.hosts.run(LAPTOP, *CTL, *words, environment=environment)
        return Ran(ran.returncode, ran.stdout, ran.stderr)

    def run(self, *command: str, options: tuple[str, ...] = ()) -> Ran:
        more = ("--user", "ann", "--directory", "/home/ann", *options)
        return self.ctl("run", "--gpus", "1", *more, "--", *command)

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
    hosts = Lan((LAPTOP, BETA), real=True)
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


def test_no_secret_is_seen_by_others_on_the_host(desk: Desk) -> None:
    """Neither in arguments nor in environments of any process there."""
    peek = "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'; gpuscalectl get reservations -o json"
    ran = desk.run("sh", "-c", peek, options=("--env", f"GPUSCALE_ADDRESS={desk.address}"))
    assert "gpuscalectl\nsupervise" in ran.out.replace("/bin/", "\n"), ran.out[-500:]
    assert "lease_token" not in ran.out + ran.err
    assert "leaseToken" not in ran.out + ran.err


def test_standard_input_goes_to_the_command(desk: Desk) -> None:
    words = " ".join(
        [*CTL, "run", "--gpus", "1", "--user", "ann", "--directory", "/home/ann", "--", "wc", "-c"]
    )
    environment = ctl_environment(GPUSCALE_ADDRESS=desk.address, HOME="/root")
    ran = desk.hosts.run(LAPTOP, "sh", "-c", f"head -c 300000 /dev/zero | {words}", environment=environment)
    assert (ran.returncode, ran.stdout.strip()) == (0, "300000"), ran.stderr


def test_a_command_ends_with_the_connection_and_its_gpus_are_given_back(desk: Desk) -> None:
    script = "echo $$ > /home/ann/pid; trap '' TERM; setsid sleep 7321 & sleep 7322 & wait; wait"
    words = (*CTL, "run", "--gpus", "1", "--ttl", "8s", "--user", "ann", "--directory", "/home/ann", "--")
    environment = ctl_environment(GPUSCALE_ADDRESS=desk.address, HOME="/root")
    started = desk.hosts.start(
        LAPTOP, *words, "sh", "-c", script, log=desk.folder / "run.log", environment=environment
    )

    def sleeping() -> str:
        return desk.hosts.run(BETA, "sh", "-c", "ps -eo args | grep '^sleep 732'").stdout

    eventually_sync(lambda: len(sleeping().splitlines()) == 2, timeout=30.0)
    started.kill()  # what it started, ssh, loses its pipes
    eventually_sync(lambda: sleeping() == "" and desk.held() == [], timeout=30.0)
