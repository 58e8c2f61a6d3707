"""The agent over real gRPC: snapshots of simulated GPUs and of this very host."""

import asyncio
import json
from collections.abc import Callable

import psutil

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.common.rpc.validation import violations
from gpuscale.common.wire import to_duration
from tests.support.cli import Ran, run_cli
from tests.support.monitor import running_agent, serving_agent
from tests.support.waiting import eventually


def get(max_age: float | None = None) -> monitor_api.GetSnapshotRequest:
    return monitor_api.GetSnapshotRequest(max_age=None if max_age is None else to_duration(max_age))


async def test_a_snapshot_shows_this_host_and_simulated_gpus_that_say_so() -> None:
    async with running_agent(simulated_gpu_count=3) as agent:

        async def measured() -> types_api.Snapshot | None:
            """One with the use of the CPU, which needs a span of time."""
            found = (await agent.GetSnapshot(get(0.0), timeout=30)).snapshot
            return found if found.host_reading.HasField("cpu_percent") else None

        snapshot = await eventually(measured)
    assert snapshot is not None
    assert violations(snapshot) == []
    assert snapshot.node == "alpha"
    assert snapshot.simulated
    assert [gpu.index for gpu in snapshot.gpus] == [0, 1, 2]
    assert all(gpu.simulated and gpu.uuid.startswith("SIM-") for gpu in snapshot.gpus)
    assert {gpu.state for gpu in snapshot.gpus} == {types_api.GpuState.GPU_STATE_OK}
    host = snapshot.host_reading
    assert host.memory_total_bytes == psutil.virtual_memory().total
    assert host.cpu_count == psutil.cpu_count()
    assert host.HasField("load_1m")
    assert snapshot.host.boot_id
    assert snapshot.host.hostname
    assert not snapshot.host.driver_version
    assert snapshot.gpu_problem == ""


async def test_the_command_line_takes_a_reading_of_the_last_seconds_or_a_new_one() -> None:
    async def asked(*options: str) -> Ran:
        ran = await asyncio.to_thread(run_cli, "--address", address, "snapshot", *options)
        assert ran.code == 0, ran.err
        return ran

    async def seq(*options: str) -> int:
        return int(json.loads((await asked(*options, "-o", "json")).out)["seq"])

    async with serving_agent(period_seconds=60.0) as address:
        first = await seq("--max-age", "1h")
        assert await seq() == first
        assert await seq("--fresh") == first + 1
        assert await seq("--max-age", "1h") == first + 1
        assert "SIMULATED" in (await asked()).out.upper()


async def test_where_no_driver_is_auto_means_simulated_and_nvml_means_a_problem() -> None:
    """Without GPUs the host is served all the same; on a busy machine a snapshot may come before they were looked for."""

    async def found(source: str, meets: Callable[[types_api.Snapshot], object]) -> types_api.Snapshot:
        async with running_agent(source=source) as agent:

            async def snapshot() -> types_api.Snapshot | None:
                shown = (await agent.GetSnapshot(get(0.0), timeout=30)).snapshot
                return shown if meets(shown) else None

            one: types_api.Snapshot = await eventually(snapshot)
            return one

    auto = await found("auto", lambda shown: shown.gpus)
    assert auto.simulated
    assert len(auto.gpus) == 4
    problem = "NVML: NVML Shared Library Not Found"
    nvml = await found("nvml", lambda shown: shown.gpu_problem == problem)
    assert not nvml.simulated
    assert list(nvml.gpus) == []
    assert nvml.host_reading.memory_total_bytes > 0
