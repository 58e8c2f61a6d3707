"""A private Slurm of one node on the loopback address, whose GPUs are empty files; jobs in `urgent` preempt others.

The packages' own daemons run as this user, without authentication of messages and without accounting, on free ports.
"""

import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
from contextlib import suppress

import psutil

from tests.support.guarded import GuardedFolder, GuardedProcess, PrivateServer
from tests.support.ports import free_port
from tests.support.waiting import eventually_sync

COMMAND_TIMEOUT_S = 60.0
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 60.0
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol", "sinfo")
_PACKAGE_PLACES = ("/usr/sbin", "/usr/bin", "/usr/local/sbin", "/usr/local/bin")
_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmdPort={node_port}
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0
KillWait={kill_wait}
GresTypes=gpu
MessageTimeout={message_timeout}
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} Gres=gpu:{gpus} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
PartitionName=urgent Nodes={host} PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
"""


def program(name: str) -> str | None:
    """Where one of Slurm's programs is."""
    return shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), *_PACKAGE_PLACES)))


def why_unavailable() -> str | None:
    """Why no private Slurm can run here, or None if one can."""
    missing = [name for name in PROGRAMS if program(name) is None]
    return f"Slurm is not installed: no {missing[0]} (Debian package slurm-wlm)" if missing else None


class SlurmCluster(PrivateServer):
    """A controller and one node; use it as a context manager.

    Args:
        gpus: that the node has.
        cpus: that the node says it has.
        kill_wait: seconds from SIGTERM to SIGKILL of a job that is cancelled.
        message_timeout: seconds after which a command gives a silent controller up.
    """

    def __init__(
        self, gpus: int = 8, *, cpus: int = 64, kill_wait: int = 2, message_timeout: int = 2
    ) -> None:
        self.folder = GuardedFolder("gpuscale-slurm-")
        path = self.folder.path
        for name in ("state", "spool", "gpus"):
            (path / name).mkdir()
        for index in range(gpus):
            (path / "gpus" / f"gpu{index}").touch()
        (path / "gres.conf").write_text(f"Name=gpu File={path}/gpus/gpu[0-{gpus - 1}]\n")
        self.conf = path / "slurm.conf"
        self.host = socket.gethostname().partition(".")[0]
        self.conf.write_text(
            _CONF.format(
                host=self.host,
                port=free_port(),
                node_port=free_port(),
                user=pwd.getpwuid(os.geteuid()).pw_name,
                folder=path,
                kill_wait=kill_wait,
                cpus=cpus,
                gpus=gpus,
                message_timeout=message_timeout,
            )
        )
        self.environment = os.environ | {"SLURM_CONF": str(self.conf)}
        self._controller: GuardedProcess | None = None
        self._node: GuardedProcess | None = None

    def start(self) -> None:
        """Start both, and wait until the node takes jobs.

        Raises:
            RuntimeError: they do not come up; the text holds the end of their output.
        """
        self.start_controller()
        self._node = self._spawn("slurmd")
        try:
            eventually_sync(lambda: "idle" in self.run("sinfo", "--noheader", "--format=%t"), START_TIMEOUT_S)
        except AssertionError as error:
            raise RuntimeError(f"the node does not come up: {error}\n{self.folder.tail()}") from error

    def start_controller(self) -> None:
        """Start the controller, on the state of the one before."""
        self._controller = self._spawn("slurmctld")

    def kill_controller(self) -> None:
        """End the controller as kill -9 does; jobs run on."""
        if self._controller is not None:
            self._controller.end(signal.SIGKILL, STOP_TIMEOUT_S)
            self._controller = None

    @property
    def controller_pid(self) -> int:
        """The process of the controller."""
        return int((self.folder.path / "slurmctld.pid").read_text())

    def saved(self, text: str) -> bool:
        """Whether the controller has something on disk: what it saves only after some seconds, a kill would lose."""
        state = self.folder.path / "state" / "job_state"
        return state.exists() and text.encode() in state.read_bytes()

    def run(self, name: str, *arguments: str) -> str:
        """What one of Slurm's commands says; empty where it fails."""
        found = subprocess.run(
            [program(name) or name, *arguments],
            env=self.environment,
            capture_output=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        return found.stdout.decode(errors="replace") if found.returncode == 0 else ""

    def jobs(self) -> list[tuple[str, str, str]]:
        """Number, name and state of every job, those that ended too, but for names of more than one line."""
        said = self.run("squeue", "--noheader", "--states=all", "--format=%A|%j|%T")
        return re.findall(r"^(\d+)\|(.*)\|(\w+)$", said, re.MULTILINE)

    def empty(self) -> None:
        """End every job."""
        self.run("scancel", f"--user={os.geteuid()}")
        eventually_sync(lambda: not self.run("squeue", "--noheader"), STOP_TIMEOUT_S)

    def close(self) -> None:
        """End every job, then both daemons, and remove every file."""
        try:
            if self._controller is not None:
                self.empty()
        finally:
            self.folder.close()
            self._sweep()

    def _sweep(self) -> None:
        """Kill what a node that was killed has left of its jobs: each of them has a session of its own."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("SLURM_CONF") == str(self.conf):
                    process.kill()

    def _spawn(self, name: str) -> GuardedProcess:
        return self.folder.spawn(name, [program(name) or name, "-D"], self.environment)
