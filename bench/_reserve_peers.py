"""The peers of `bench.reserve`: etcd and Slurm, started privately where they are installed.

etcd (Debian's etcd-server): one transaction that puts a key if it is absent, synced to disk before the answer, and one
that deletes it, through the same client library as ours. It has one core, that of our server, and one thread. Slurm
(Debian's slurm-wlm, one node with simulated GPUs): `salloc --no-shell` of one GPU and `scancel`, a process each; it
saves its state every few seconds, not before it answers.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import grpc

Call = Callable[[], Awaitable[int]]
"""One turn of a caller; how many calls it was."""

TXN = "/etcdserverpb.KV/Txn"
VALUE = b"v" * 256
TIMEOUT = 30.0
START = 15.0
LOOK_GAP = 0.2
SLURM_GPUS = 80
_SLURM_CONF = """
ClusterName=bench
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
SchedulerParameters=sched_min_interval=0
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs={gpus} Gres=gpu:{gpus} State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


@asynccontextmanager
async def etcd(core: int) -> AsyncIterator[tuple[int, Call] | str]:
    """The process of an etcd on a core, and a turn of two transactions; or why there is none."""
    program = shutil.which("etcd")
    if program is None:
        yield "not installed: apt install etcd-server"
        return
    client, peer = (f"http://127.0.0.1:{_free_port()}" for _ in range(2))
    with tempfile.TemporaryDirectory(prefix="gpuscale-etcd-") as folder:
        server = await asyncio.create_subprocess_exec(
            *(program, "--data-dir", folder, "--logger", "zap", "--log-level", "error"),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"default={peer}"),
            stderr=asyncio.subprocess.DEVNULL,
            env=os.environ | {"GOMAXPROCS": "1"},
        )
        try:
            os.sched_setaffinity(server.pid, {core})
            async with grpc.aio.insecure_channel(client.removeprefix("http://")) as channel:
                await asyncio.wait_for(channel.channel_ready(), START)
                yield server.pid, _transactions(channel)
        finally:
            server.terminate()
            await server.wait()


def _transactions(channel: grpc.aio.Channel) -> Call:
    call = channel.unary_unary(TXN)
    numbers = count()

    async def turn() -> int:
        key = b"reservations/%d" % next(numbers)
        absent = _field(1, _field(3, key) + b"\x20\x00")  # compare: the version of the key is 0
        put = _field(2, _field(2, _field(1, key) + _field(2, VALUE)))
        delete = _field(2, _field(3, _field(1, key)))
        answer = await call(absent + put, timeout=TIMEOUT)
        assert b"\x10\x01" in answer  # succeeded
        await call(delete, timeout=TIMEOUT)
        return 2

    return turn


def _field(number: int, content: bytes) -> bytes:
    """A field of bytes in protobuf's encoding: the etcd client's messages are too few to generate code for."""
    size, length = len(content), b""
    while size > 0x7F:
        length += bytes((size & 0x7F | 0x80,))
        size >>= 7
    return bytes((number << 3 | 2,)) + length + bytes((size,)) + content


@asynccontextmanager
async def slurm() -> AsyncIterator[tuple[int, Call] | str]:
    """The process of a Slurm controller and a turn of salloc and scancel; or why there is none."""
    programs = [shutil.which(name) for name in ("slurmctld", "slurmd", "salloc", "scancel", "sinfo")]
    controller, node, salloc, scancel, sinfo = programs
    if not (controller and node and salloc and scancel and sinfo):
        yield "not installed: apt install slurm-wlm"
        return
    with tempfile.TemporaryDirectory(prefix="gpuscale-slurm-") as folder:
        environment = os.environ | {"SLURM_CONF": str(_slurm_conf(Path(folder)))}
        async with _daemon(controller, environment) as pid, _daemon(node, environment):
            if await _is_up(sinfo, environment):
                yield pid, _allocations(salloc, scancel, environment)
            else:
                yield "installed, but its node does not come up here"


def _slurm_conf(folder: Path) -> Path:
    """Write the configuration of a cluster of one node, whose GPUs are empty files."""
    for name in ("state", "spool", "gpus"):
        (folder / name).mkdir()
    for index in range(SLURM_GPUS):
        (folder / "gpus" / f"gpu{index}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpus/gpu[0-{SLURM_GPUS - 1}]\n")
    conf = folder / "slurm.conf"
    host, ports = socket.gethostname().split(".")[0], (_free_port(), _free_port())
    user = pwd.getpwuid(os.getuid()).pw_name
    conf.write_text(
        _SLURM_CONF.format(
            host=host, port=ports[0], node_port=ports[1], user=user, folder=folder, gpus=SLURM_GPUS
        )
    )
    return conf


@asynccontextmanager
async def _daemon(program: str, environment: dict[str, str]) -> AsyncIterator[int]:
    """A daemon in the foreground, until the end of the block; its process."""
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(program, "-D", env=environment, stdout=quiet, stderr=quiet)
    try:
        yield process.pid
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _is_up(sinfo: str, environment: dict[str, str]) -> bool:
    """Whether the node is idle before long."""
    for _ in range(int(START / LOOK_GAP)):
        _, said = await _run(environment, sinfo, "--noheader", "--format=%t")
        if "idle" in said:
            return True
        await asyncio.sleep(LOOK_GAP)
    return False


def _allocations(salloc: str, scancel: str, environment: dict[str, str]) -> Call:
    ask = ("--no-shell", "--immediate=10", "--gres=gpu:1", "--ntasks=1")

    async def turn() -> int:
        status, said = await _run(environment, salloc, *ask)
        if status:
            raise RuntimeError(f"salloc: {said.strip()}")
        number = said.split("job allocation ")[1].split()[0]
        await _run(environment, scancel, number)
        return 2

    return turn


async def _run(environment: dict[str, str], program: str, *arguments: str) -> tuple[int, str]:
    """Run a program; its exit status and what it said."""
    process = await asyncio.create_subprocess_exec(
        program,
        *arguments,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    return process.returncode or 0, said.decode(errors="replace")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
