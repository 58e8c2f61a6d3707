"""Holders are known on their own GPU, on a driver's double: shares whose work detaches, and one that fits; a container; others."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpuscale.client import connect, connect_async
from tests.support.cli import Ran, run_cli
from tests.support.fixtures import need
from tests.support.nvml_double import GIB, DoubleProcess, NvmlDouble, env_with_double, why_unavailable
from tests.support.podman import IMAGE, Podman
from tests.support.up import CTL, Typed, Up, ctl_environment
from tests.support.waiting import eventually_sync

SHARE = (
    *("run", "--gpus", "1", "--wait", "0s", "--share", "0.25"),
    *("--gpu-memory", "20GiB", "--min-memory", "0"),
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Up, NvmlDouble]]:
    need(why_unavailable())
    folder = tmp_path_factory.mktemp("holders")
    found = NvmlDouble(folder, 1)
    found.gpus[0].memory_reserved_bytes = 0
    found.write()
    with Up(folder, environment={**ctl_environment(), **env_with_double(found)}) as running:
        yield running, found


@pytest.fixture
def double(site: tuple[Up, NvmlDouble]) -> NvmlDouble:
    use(site[1])
    return site[1]


@pytest.fixture
def up(site: tuple[Up, NvmlDouble], double: NvmlDouble) -> Iterator[Up]:
    """It knows of nobody on the GPU, and nothing is held, before and after a test."""
    eventually_sync(lambda: (usages_of_gpu(site[0]), usages(site[0])) == ([], []))
    yield site[0]
    eventually_sync(lambda: usages(site[0]) == [])


def use(double: NvmlDouble, *processes: tuple[int, int]) -> None:
    """Let processes use so many GiB each, and the GPU with it; and nothing else."""
    gpu = double.gpus[0]
    gpu.processes = [DoubleProcess(pid, amount * GIB) for pid, amount in processes]
    gpu.memory_used_bytes = sum(amount for _, amount in processes) * GIB
    gpu.utilization_percent = 30 if processes else 0
    double.write()


def start(up: Up, script: str) -> tuple[Typed, int]:
    """A share, and the pid that its command says."""
    process = Typed("--address", up.address, *SHARE, "--", "sh", "-c", script)
    return process, int(process.stdout.readline())


def usages(up: Up) -> list[dict[str, Any]]:
    found = run_cli("--address", up.address, "get", "reservations", "-o", "json")
    return [one["usage"] for one in json.loads(found.out)["reservations"]]


def test_two_shares_that_use_what_they_hold_leave_the_rest_to_a_third(up: Up, double: NvmlDouble) -> None:
    """One forks and execs; the other detaches from all: another session, no environment, no parent."""
    one, first = start(up, "sh -c 'echo $$; exec sleep 900'; true")
    other, second = start(up, "env -i setsid sh -c 'sh -c \"echo \\$\\$; exec sleep 900\" & exit'; sleep 900")
    outsider = subprocess.Popen(["sleep", "900"])
    gone = subprocess.Popen(["true"])
    gone.wait()
    try:
        assert [usage.get("overused", False) for usage in usages(up)] == [False, False]
        use(double, (first, 20), (second, 20), (gone.pid, 1))

        def unclear() -> bool:
            found = usages(up)
            return all(
                usage.get("idle") is False and "memoryUsedBytes" not in gpu and gpu["outsiderPids"] == []
                for usage in found
                for gpu in usage["gpus"]
            )

        eventually_sync(unclear)
        use(double, (first, 20), (second, 20))
        eventually_sync(
            lambda: (
                [gpu.get("memoryUsedBytes") for usage in usages(up) for gpu in usage["gpus"]]
                == [str(20 * GIB)] * 2
            )
        )
        third = run_cli("--address", up.address, *SHARE, "--gpu-memory", "39GiB", "--", "true")
        assert third.code == 0, third.err
        use(double, (first, 20), (second, 20), (outsider.pid, 10))
        eventually_sync(
            lambda: all(
                gpu.get("outsiderPids") == [str(outsider.pid)]
                for usage in usages(up)
                for gpu in usage["gpus"]
            )
        )
        refused = run_cli("--address", up.address, *SHARE, "--gpu-memory", "31GiB", "--", "true")
        assert refused.code == 5, refused.err
        assert f"sleep ({outsider.pid})" in refused.err
        assert f"({first})" not in refused.err
    finally:
        for process in (one, other):
            process.send_signal(signal.SIGTERM)
            process.ended()
        outsider.kill()
        outsider.wait()


def test_a_container_is_a_holder(up: Up, double: NvmlDouble, podman: Podman) -> None:
    """Podman has it begin below a process that has left the command's."""
    seconds = str(1_000_000_000 + os.getpid())
    words = (
        *SHARE,
        "--",
        "podman",
        "run",
        "--rm",
        "--volume",
        "/dev/pts:/dev/pts",
        IMAGE,
        "/bin/sleep",
        seconds,
    )

    def inside() -> psutil.Process:
        found = (
            one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == ["/bin/sleep", seconds]
        )
        return next(found)

    with subprocess.Popen(
        [*CTL, "--address", up.address, *words], env={**ctl_environment(), **podman.environment}
    ) as running:
        container = eventually_sync(inside, retry_on=(StopIteration,))
        use(double, (container.pid, 20))

        def exact() -> bool:
            [gpu] = usages(up)[0]["gpus"]
            return (gpu.get("memoryUsedBytes"), gpu["outsiderPids"]) == (str(20 * GIB), [])

        eventually_sync(exact)
        container.kill()
        assert running.wait(60) == 137


def test_the_process_of_a_python_lease_is_a_holder(up: Up, double: NvmlDouble) -> None:
    """Of a block with an event loop and of one without: each admits itself before the block begins."""
    ask: Any = {"gpu_milli": 250, "gpu_memory": "20GiB", "min_memory": 0}

    def known() -> bool:
        [usage] = usages(up)
        [gpu] = usage["gpus"]
        return gpu.get("memoryUsedBytes") == str(5 * GIB) and gpu["outsiderPids"] == []

    async def asynchronously() -> None:
        async with connect_async(up.address) as client, client.reserve(1, "async", **ask):
            await asyncio.to_thread(eventually_sync, known, 30)

    use(double, (os.getpid(), 5))
    with connect(up.address) as client, client.reserve(1, "sync", **ask):
        eventually_sync(known)
    eventually_sync(lambda: usages(up) == [])
    asyncio.run(asynchronously())


def test_a_process_that_runs_already_is_adopted_and_its_gpu_is_nobody_elses_until_it_ends(
    up: Up, double: NvmlDouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    def ctl(*words: str) -> Ran:
        return run_cli("--address", up.address, *words)

    def listed(*options: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(ctl("get", "jobs", "-o", "json", *options).out)["jobs"]
        return found

    with subprocess.Popen(["sleep", "7461"]) as process, ExitStack() as stack:
        stack.callback(process.kill)
        pid = str(process.pid)
        assert "none of these processes uses a GPU" in ctl("adopt", pid).err
        use(double, (process.pid, 60))
        eventually_sync(lambda: usages_of_gpu(up) == [process.pid])
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
        refused = ctl("adopt", pid)
        assert (refused.code, f"process {pid} is" in refused.err) == (8, True)
        monkeypatch.undo()
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
        name = ctl("adopt", pid, "--name", "old").out.strip()
        eventually_sync(lambda: listed()[0]["job"]["state"] == "STATE_RUNNING")
        assert listed()[0]["job"]["title"] == "old"
        eventually_sync(
            lambda: [(one.get("idle"), one["gpus"][0]["outsiderPids"]) for one in usages(up)] == [(False, [])]
        )
        assert ctl("adopt", pid).code == 5  # it is held
        assert ctl("stop", name).code == 0
        assert process.wait(timeout=30) == -15
    assert (listed(), listed("-a")[0]["job"]["state"]) == ([], "STATE_STOPPED")
    with subprocess.Popen(["sleep", "7462"]) as process, ExitStack() as stack:
        stack.callback(process.kill)
        use(double, (process.pid, 60))
        eventually_sync(lambda: usages_of_gpu(up) == [process.pid])
        assert ctl("adopt", str(process.pid)).code == 0
    eventually_sync(lambda: listed() == [])


def usages_of_gpu(up: Up) -> list[int]:
    """The processes that the fleet knows on the GPU."""
    [node] = json.loads(run_cli("--address", up.address, "get", "nodes", "-o", "json").out)["nodes"]
    return [int(one["pid"]) for one in node["snapshot"]["gpus"][0]["reading"].get("processes", ())]
