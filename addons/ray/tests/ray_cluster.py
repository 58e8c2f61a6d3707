"""A Ray cluster of one node with logical GPUs, gone with the test run; skipped where Ray is not installed.

Ray listens on every address of the host whatever it is told, so it takes only who knows a token made for this run. In a network
namespace of its own it would be out of reach of the adapter under test, whose autoscaler is on this host's loopback.
"""

import os
import secrets
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil

from tests.support.fixtures import need
from tests.support.guarded import GuardedFolder, GuardedProcess
from tests.support.ports import free_port, listens
from tests.support.waiting import eventually_sync

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class RayCluster:
    """One that runs.

    Attributes:
        address: HOST:PORT.
        environment: variables that whoever connects needs.
        head: its processes.
    """

    address: str
    environment: dict[str, str]
    head: GuardedProcess

    @contextmanager
    def paused(self) -> Generator[None]:
        """The part that knows the whole cluster answers nobody for a while."""
        port = f"--gcs_server_port={self.address.rpartition(':')[2]}"
        [brain] = [one for one in psutil.process_iter(["cmdline"]) if port in (one.info["cmdline"] or ())]
        brain.suspend()
        try:
            yield
        finally:
            brain.resume()


@contextmanager
def ray_cluster(gpus: int = 4, cpus: int = 8) -> Generator[RayCluster]:
    """Start one; leaving stops all of it."""
    if find_spec("ray") is None:
        need("Ray is not installed (requirements-dev.txt)")
    folder = GuardedFolder("ray")  # sockets stand below it, and their paths must be short
    port = free_port()
    environment = {
        **os.environ,
        "HOME": str(folder.path),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_prestart_worker_first_driver": "0",  # a Python for each CPU; here actors have their own
    }
    command = [
        str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--node-ip-address=127.0.0.1",
        f"--port={port}", f"--num-gpus={gpus}", f"--num-cpus={cpus}", "--include-dashboard=false",
        "--include-log-monitor=false", "--object-store-memory=80000000", f"--temp-dir={folder.path}/t",
        "--disable-usage-stats",
    ]  # fmt: skip
    try:
        head = folder.spawn("ray", command, environment)

        eventually_sync(
            lambda: not head.running or (listens(port) and "Ray runtime started" in folder.tail()),
            START_TIMEOUT_S,
            0.2,
        )
        assert head.running, folder.tail()
        yield RayCluster(f"127.0.0.1:{port}", environment, head)
        head.end(signal.SIGKILL, STOP_TIMEOUT_S)
    finally:
        folder.close()
