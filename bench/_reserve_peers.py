"""The peers of `bench.reserve`: etcd and Slurm, started privately where they are installed.

etcd (Debian's etcd-server): one transaction that puts a key if it is absent, synced to disk before the answer, and one
that deletes it, through the same client as ours. It has one core, that of our server, and one thread. Slurm
(Debian's slurm-wlm, one node with simulated GPUs): `salloc --no-shell` of one GPU and `scancel`, a process each; it
saves its state every few seconds, not before it answers.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from itertools import count

from addons.slurm.tests.slurm_cluster import SlurmCluster, program, why_unavailable
from bench._callers import Caller, connected

Call = Callable[[], Awaitable[int]]
"""One turn of a caller; how many calls it was."""

TXN = "/etcdserverpb.KV/Txn"
VALUE = b"v" * 256
START = 15.0
SLURM_GPUS = 80


@asynccontextmanager
async def postgresql() -> AsyncIterator[str]:
    """The URL of a private PostgreSQL that waits for the disk, on any core; empty where there is none."""
    from tests.support.postgresql import PostgresServer
    from tests.support.postgresql import why_unavailable as why_no_postgresql

    if why_no_postgresql() is not None:
        yield ""
        return
    server = PostgresServer(durable=True)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        with server:
            os.sched_setaffinity(0, cores)
            yield server.database().reveal()
    finally:
        os.sched_setaffinity(0, cores)


@asynccontextmanager
async def etcd(client: str, core: int) -> AsyncIterator[tuple[int, Call] | str]:
    """The process of an etcd on a core, and a turn of two transactions; or why there is none."""
    program = shutil.which("etcd")
    if program is None:
        yield "not installed: apt install etcd-server"
        return
    served, peer = (f"http://127.0.0.1:{_free_port()}" for _ in range(2))
    with tempfile.TemporaryDirectory(prefix="gpuscale-etcd-") as folder:
        server = await asyncio.create_subprocess_exec(
            *(program, "--data-dir", folder, "--logger", "zap", "--log-level", "error"),
            *("--listen-client-urls", served, "--advertise-client-urls", served),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"default={peer}"),
            stderr=asyncio.subprocess.DEVNULL,
            env=os.environ | {"GOMAXPROCS": "1"},
        )
        try:
            os.sched_setaffinity(server.pid, {core})
            address = served.removeprefix("http://")
            await _listening(address)
            async with connected(client, address) as call:
                yield server.pid, _transactions(call)
        finally:
            server.terminate()
            await server.wait()


async def _listening(address: str) -> None:
    """Wait until something listens there."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(START):
        while True:
            with suppress(OSError):
                _, writer = await asyncio.open_connection(host, int(port))
                writer.close()
                return
            await asyncio.sleep(0.05)


def _transactions(call: Caller) -> Call:
    numbers = count()

    async def turn() -> int:
        key = b"reservations/%d" % next(numbers)
        absent = _field(1, _field(3, key) + b"\x20\x00")  # compare: the version of the key is 0
        put = _field(2, _field(2, _field(1, key) + _field(2, VALUE)))
        delete = _field(2, _field(3, _field(1, key)))
        answer = await call(TXN, absent + put)
        assert b"\x10\x01" in answer  # succeeded
        await call(TXN, delete)
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
    why, salloc, scancel = why_unavailable(), program("salloc"), program("scancel")
    if why or not (salloc and scancel):
        yield why or "not installed: apt install slurm-wlm"
        return
    cluster = await asyncio.to_thread(SlurmCluster, SLURM_GPUS, cpus=SLURM_GPUS, message_timeout=10)
    try:
        await asyncio.to_thread(cluster.start)
    except RuntimeError:
        yield "installed, but its node does not come up here"
    else:
        yield cluster.controller_pid, _allocations(salloc, scancel, cluster.environment)
    finally:
        await asyncio.to_thread(cluster.close)


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
