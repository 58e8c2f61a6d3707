"""How long an agent takes to answer, while all of its GPUs are well and while one of them hangs."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.common.rpc.channel import open_sync_channel
from tests.support.nvml_double import NvmlDouble, env_with_double, wired_gpus
from tests.support.ports import free_port

if TYPE_CHECKING:
    from gpuscale.api.monitor.v1.agent_service_pb2_grpc import AgentServiceStub

GPUS = 8
GIVE_UP_SECONDS = 60.0


def print_answers(calls: int) -> None:
    """Measure so many calls of either kind, one after the other, and print the table."""
    with tempfile.TemporaryDirectory(prefix="gpuscale-bench-") as folder:
        double = NvmlDouble(Path(folder))
        double.gpus, double.moving = wired_gpus(GPUS), True
        double.write()
        address = f"127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "gpuscale.monitor.app.agent", "--listen", address]
        process = subprocess.Popen(command, env=env_with_double(double), stderr=subprocess.DEVNULL)
        try:
            with open_sync_channel(address) as channel:
                _measure(monitor_api.AgentServiceStub(channel), double, calls)
        finally:
            process.terminate()
            process.wait()


def _measure(agent: AgentServiceStub, double: NvmlDouble, calls: int) -> None:
    _until(agent, types_api.GpuState.GPU_STATE_OK)
    time.sleep(2.0)  # its own start is over
    rows = [("all GPUs well", _times(agent, calls))]
    double.hold(double.gpus[0].rules)
    double.write()
    _until(agent, types_api.GpuState.GPU_STATE_HUNG)
    rows.append(("one GPU hangs", _times(agent, calls)))
    print(f"\n{'GetSnapshot':<22}{'p50 ms':>8}{'p99 ms':>8}{'most ms':>9}{'calls':>8}")
    for name, times in rows:
        p50, p99 = times[calls // 2], times[calls * 99 // 100 - 1]
        print(f"{name:<22}{p50:>8.2f}{p99:>8.2f}{times[-1]:>9.2f}{calls:>8}")


def _times(agent: AgentServiceStub, calls: int) -> list[float]:
    """What each call took, in milliseconds, the quickest first."""
    took: list[float] = []
    for _ in range(calls):
        began = time.perf_counter()
        agent.GetSnapshot(monitor_api.GetSnapshotRequest(), timeout=10)
        took.append(1000 * (time.perf_counter() - began))
        time.sleep(0.005)
    return sorted(took)


def _until(agent: AgentServiceStub, state: types_api.GpuState.ValueType) -> None:
    """Wait until the first GPU has that state, and all others are well."""
    deadline = time.monotonic() + GIVE_UP_SECONDS
    wanted = [state] + [types_api.GpuState.GPU_STATE_OK] * (GPUS - 1)
    while time.monotonic() < deadline:
        answer = agent.GetSnapshot(
            monitor_api.GetSnapshotRequest(), timeout=GIVE_UP_SECONDS, wait_for_ready=True
        )
        if [gpu.state for gpu in answer.snapshot.gpus] == wanted:
            return
        time.sleep(0.1)
    sys.exit("the agent does not show what it should")
