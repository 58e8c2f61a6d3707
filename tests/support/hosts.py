"""Hosts on one machine: namespaces of their own for network, mounts, processes, names and IPC, joined by a bridge, with real sshd.

A host has its own /etc and /var/lib (over the machine's), /home, /root, /run, /tmp and /proc, and two Unix users who log in by
their keys to every host, as themselves. The checkout, its Python and the folder that a test shares are where they are outside.

Real sshd needs real root. A host lives as long as its process 1, which ends when the test's process does, however that ends:
everything goes with it, and nothing has a name outside that other runs could have too.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Self

from tests.support.cli import Ran
from tests.support.shell import Shell
from tests.support.up import ctl_environment
from tests.support.waiting import eventually_sync

ROOT = Path(__file__).parents[2]
SSHD = "/usr/sbin/sshd"
ANSWER_SECONDS = 120.0
USERS = {"ann": 5001, "bob": 5002}
_BIN = Path(sys.executable).parent
_APART = ("unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
_HOLD = ("sh", "-c", "echo ready; exec env --ignore-signal=CHLD cat >/dev/null")
"""Process 1 of a host: what is left to it is reaped by the kernel, and it ends with its standard input."""
_FURNISH = """
set -e
hostname {name}
mount -t tmpfs -o mode=755 none /mnt
number=0
for path in {kept}; do
  number=$((number + 1)); mkdir -p /mnt/kept/$number; mount --bind $path /mnt/kept/$number
done
for path in /etc /var/lib; do
  mkdir -p /mnt/up$path /mnt/work$path
  mount -t overlay -o lowerdir=$path,upperdir=/mnt/up$path,workdir=/mnt/work$path none $path
done
for path in /home /root /run; do mount -t tmpfs -o mode=755 none $path; done
mount -t tmpfs -o mode=1777 none /tmp
number=0
for path in {kept}; do
  number=$((number + 1)); mkdir -p $path; mount --bind /mnt/kept/$number $path
done
mkdir -p /run/sshd
cp {keys}/hosts /etc/hosts
echo {name} > /etc/hostname
grep -q ^sshd: /etc/passwd || echo sshd:x:100:65534::/run/sshd:/usr/sbin/nologin >> /etc/passwd
{users}
cp {keys}/host_key {keys}/host_key.pub {keys}/sshd_config {keys}/ssh_known_hosts /etc/ssh/
chmod 600 /etc/ssh/host_key
"""
_USER = """
echo {user}:x:{number}:{number}::/home/{user}:/bin/bash >> /etc/passwd
echo {user}:x:{number}: >> /etc/group
echo '{user}:*:19000::::::' >> /etc/shadow
mkdir -p /home/{user}/.ssh
cp {keys}/{user} /home/{user}/.ssh/id_ed25519
cp {keys}/{user}.pub /home/{user}/.ssh/authorized_keys
chmod 700 /home/{user} /home/{user}/.ssh
chmod 600 /home/{user}/.ssh/id_ed25519
chown -R {number}:{number} /home/{user}
"""
_SSHD = f"HostKey /etc/ssh/host_key\nUsePAM no\nPasswordAuthentication no\nUseDNS no\nSetEnv PATH={_BIN}:/usr/bin:/bin\n"


@cache
def why_unavailable() -> str | None:
    """Why there can be no such hosts here, or None if there can."""
    for tool in ("ip", "unshare", "nsenter", "ssh", "ssh-keygen", SSHD):
        if shutil.which(tool) is None:
            return f"no {tool} (Debian packages iproute2, util-linux, openssh-client and openssh-server)"
    if os.geteuid() != 0:
        return "sshd logs users in as root alone"
    probe = "ip link add name br0 type bridge && mount -t tmpfs none /mnt && mkdir /mnt/u /mnt/w"
    probe += " && mount -t overlay -o lowerdir=/etc,upperdir=/mnt/u,workdir=/mnt/w none /etc"
    tried = subprocess.run(
        [*_APART, "sh", "-c", probe], check=False, capture_output=True, text=True, timeout=60
    )
    why = f"no namespaces or overlays here, even as root: {tried.stderr.strip()}"
    return None if tried.returncode == 0 else why


class Running:
    """A program that runs on a host; signals reach the program itself."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        with log.open("ab") as output:
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            self.process = subprocess.Popen(words, env=dict(environment), start_new_session=True, **streams)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        child = eventually_sync(lambda: children(self.process.pid) or self.process.poll() is not None)
        if child is not True:
            os.kill(child[0], number)

    def wait(self, timeout: float = 60.0) -> int:
        """Its exit code, negative for a signal."""
        return self.process.wait(timeout)


class Hosts:
    """Hosts of these names, while its block runs.

    Args:
        names: of the hosts.
        folder: a folder that all of them and the test see.
        shared: more such folders.
    """

    def __init__(self, names: Sequence[str], folder: Path, *, shared: Sequence[Path] = ()) -> None:
        self.folder = folder
        self._numbers = {name: number for number, name in enumerate(names, 1)}
        self._shared = (folder, *shared)
        self._keys = folder / "keys"
        self._stack = ExitStack()
        self._holders: dict[str, subprocess.Popen[str]] = {}
        self._started: list[Running] = []
        self._shells: dict[tuple[str, str], list[Shell]] = {}

    def __enter__(self) -> Self:
        with self._stack:
            self._stack.callback(self._reap)
            self._make_keys()
            self._hold("")
            self._ip("", "link add name br0 type bridge", "link set br0 up")
            for name in self._numbers:
                self._boot(name)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _boot(self, name: str) -> None:
        pid, port = self._hold(name), self._port(name)
        self._ip("", f"link add name {port} type veth peer name eth0 netns {pid}")
        self._ip("", f"link set {port} master br0", f"link set {port} up")
        self._ip(name, f"addr add {self.address(name)}/24 dev eth0", "link set eth0 up", "link set lo up")
        users = "".join(
            _USER.format(user=user, number=number, keys=self._keys) for user, number in USERS.items()
        )
        kept = " ".join(shlex.quote(str(one)) for one in self._kept())
        script = _FURNISH.format(name=name, kept=kept, keys=self._keys, users=users)
        made = self.run(name, "sh", "-c", script)
        assert made.code == 0, made.err
        self.start(name, SSHD, "-D", "-e", "-f", "/etc/ssh/sshd_config", log=f"{name}.sshd.log")
        listens = ("sh", "-c", "exec 3<>/dev/tcp/127.0.0.1/22")
        eventually_sync(lambda: self.run(name, "bash", *listens[1:]).code == 0, interval=0.1)

    def kill(self, name: str) -> None:
        """End a host with all that runs on it, at once; its peers are not told."""
        holder = self._holders.pop(name)
        for pid in children(holder.pid):
            os.kill(pid, signal.SIGKILL)
        holder.communicate()

    def root(self, name: str) -> Path:
        """The files of a host, as seen from here."""
        [pid] = children(self._holders[name].pid)
        return Path(f"/proc/{pid}/root")

    @property
    def up(self) -> list[str]:
        """The hosts that were not killed."""
        return [name for name in self._numbers if name in self._holders]

    def address(self, name: str) -> str:
        """The IP address of a host; the others know it by its name too."""
        return f"10.77.0.{self._numbers[name]}"

    def cut(self, name: str) -> None:
        """Take the link of a host down: nothing gets through, and nobody is told."""
        self._ip("", f"link set {self._port(name)} down")

    def mend(self, name: str) -> None:
        """Take it up again."""
        self._ip("", f"link set {self._port(name)} up")

    def run(
        self,
        name: str,
        *command: str,
        user: str = "root",
        environment: Mapping[str, str] | None = None,
        stdin: str = "",
    ) -> Ran:
        words, variables = self.typed(name, *command, user=user, environment=environment)
        how = {"capture_output": True, "text": True, "timeout": ANSWER_SECONDS}
        ran = subprocess.run(words, check=False, env=variables, input=stdin, **how)
        return Ran(ran.returncode, ran.stdout, ran.stderr)

    def ctl(self, name: str, *words: str, user: str = "root", stdin: str = "") -> Ran:
        """Type a command of gpuscalectl in a shell of that user, in which nobody else types meanwhile."""
        idle = self._shells.setdefault((name, user), [])
        try:
            shell = idle.pop()
        except IndexError:
            shell = Shell(_environment(user, None), self._inside(name, user))
        ran = shell.ctl(*words, stdin=stdin)
        idle.append(shell)
        return ran

    def start(
        self,
        name: str,
        *command: str,
        log: str,
        user: str = "root",
        environment: Mapping[str, str] | None = None,
    ) -> Running:
        """Start a program on a host; its output goes to the end of a file in the folder of the test."""
        words, variables = self.typed(name, *command, user=user, environment=environment)
        self._started.append(Running(words, variables, self.folder / log))
        return self._started[-1]

    def typed(
        self, name: str, *command: str, user: str, environment: Mapping[str, str] | None = None
    ) -> tuple[list[str], dict[str, str]]:
        """What runs a program on a host from here: its command line and environment."""
        return [*self._inside(name, user), *command], _environment(user, environment)

    def command_lines(self, name: str, beginning: str = "") -> list[str]:
        """What runs on a host, zombies left out: command lines that begin so."""
        lines = self.run(name, "ps", "-eo", "stat=,args=").out.splitlines()
        found = [args for stat, _, args in (line.strip().partition(" ") for line in lines) if stat[0] != "Z"]
        return [args.strip() for args in found if args.strip().startswith(beginning)]

    def _hold(self, name: str) -> int:
        """Start process 1 of a host, or of the cable between them, which has no name; its pid out here."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        holder = subprocess.Popen([*_APART, *_HOLD], text=True, **pipes)
        self._holders[name] = holder
        self._stack.callback(self._end, holder)
        assert holder.stdout.readline() == "ready\n"
        [pid] = children(holder.pid)
        return pid

    @staticmethod
    def _end(holder: "subprocess.Popen[str]") -> None:
        if holder.poll() is None:
            holder.communicate()  # closes its standard input

    def _reap(self) -> None:
        for one in self._started:
            one.wait()
        for shell in chain.from_iterable(self._shells.values()):
            shell.close()

    def _make_keys(self) -> None:
        self._keys.mkdir()
        self.folder.chmod(0o755)
        for key in ("host_key", *USERS):
            words = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._keys / key))
            subprocess.run(words, check=True, timeout=60)
        public = (self._keys / "host_key.pub").read_text()
        places = {name: self.address(name) for name in self._numbers}
        (self._keys / "hosts").write_text(
            "127.0.0.1 localhost\n" + "".join(f"{where} {name}\n" for name, where in places.items())
        )
        (self._keys / "ssh_known_hosts").write_text(
            "".join(f"{name},{where} {public}" for name, where in places.items())
        )
        (self._keys / "sshd_config").write_text(_SSHD)
        (self._keys / "host_key").chmod(0o600)

    def _kept(self) -> list[Path]:
        """What would be hidden by the folders that a host has of its own, none below another."""
        wanted = {one.resolve() for one in (ROOT, Path(sys.prefix), Path(sys.base_prefix), *self._shared)}
        hidden = [one for one in wanted if str(one).startswith(("/home/", "/root/", "/run/", "/tmp/"))]
        return sorted(one for one in hidden if not any(other in one.parents for other in hidden))

    def _inside(self, name: str, user: str) -> list[str]:
        [pid] = children(self._holders[name].pid)
        if not name:  # the cable joins hosts by their pids out here
            return ["nsenter", "--target", str(pid), "--net"]
        words = ["nsenter", "--target", str(pid), "--net", "--mount", "--uts", "--ipc", "--pid"]
        if user == "root":
            return [*words, f"--wdns={ROOT}"]
        number = str(USERS[user])
        return [*words, "--setgid", number, "--setuid", number, f"--wdns=/home/{user}"]

    def _port(self, name: str) -> str:
        return f"port{self._numbers[name]}"

    def _ip(self, name: str, *commands: str) -> None:
        lines = "".join(f"{command}\n" for command in commands)
        words = [*self._inside(name, "root"), "ip", "-batch", "-"]
        subprocess.run(words, input=lines, check=True, text=True, timeout=60)


def children(pid: int) -> list[int]:
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except FileNotFoundError:
        return []


def _environment(user: str, more: Mapping[str, str] | None) -> dict[str, str]:
    """What a login finds, and what this checkout needs."""
    home = "/root" if user == "root" else f"/home/{user}"
    own = {"HOME": home, "USER": user, "LOGNAME": user, "PATH": f"{_BIN}:/usr/sbin:/usr/bin:/sbin:/bin"}
    return {**ctl_environment(), **own, **(more or {})}
