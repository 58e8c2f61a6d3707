"""MIG switched on, laid out anew and off while an agent reads, serves and streams: eight GPUs of seven instances."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import httpx
import pytest

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.api.types.v1 import GpuState
from gpuscale.monitor.agent.nvml import source, tick
from gpuscale.monitor.agent.nvml.field_values import GPM_METRICS
from tests.support.monitor import running_fleet
from tests.support.nvml_double import GIB, DoubleGpu, DoubleProcess, NvmlDouble, wired_gpus
from tests.support.nvml_site import OK, Site, site
from tests.support.ports import free_port
from tests.support.promtool import named
from tests.support.waiting import eventually

GPUS, PARTS = 8, 7
DIVIDED = GpuState.GPU_STATE_DIVIDED


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances are looked for, and counters sampled, as often as a test can wait for."""
    monkeypatch.setattr(source, "FIRST_PARTS_SECONDS", 0.3)
    monkeypatch.setattr(source, "SLOW_EVERY_SECONDS", 0.3)
    monkeypatch.setattr(tick, "ACTIVITY_EVERY_SECONDS", 0.2)
    monkeypatch.setattr(tick, "_FIRST_ACTIVITY_SECONDS", 0.1)


def part(gpu: int, number: int) -> DoubleGpu:
    """An instance, of which every counter says another share than of any other instance."""
    return DoubleGpu(
        f"MIG-{gpu}-{number}",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        memory_total_bytes=10 * GIB,
        memory_used_bytes=number * GIB,
        gpu_instance=number,
        compute_instance=0,
        activity=dict.fromkeys(GPM_METRICS.values(), 10.0 * (gpu + 1) + number),
    )


def divide(double: NvmlDouble, parts: int) -> None:
    """Have so many instances on each GPU; none switches MIG off."""
    for index, gpu in enumerate(double.gpus):
        gpu.mig_mode = int(parts > 0)
        gpu.utilization_percent = None if parts else 90
        gpu.mig_devices = [part(index, number) for number in range(1, parts + 1)]
    double.write()


@asynccontextmanager
async def watched(one: Site) -> AsyncGenerator[list[int]]:
    """Ask for snapshots all the time, and look at each for what must never be; counts those that were looked at."""
    seen: list[int] = [0]

    async def watch() -> None:
        while True:
            consistent(await one.snapshot())
            seen[0] += 1

    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch())
        yield seen
        watching.cancel()


def consistent(snapshot: types_api.Snapshot) -> None:
    """No GPU twice, no instance without its GPU, and no use of an instance, which has none."""
    by_uuid = {gpu.uuid: gpu for gpu in snapshot.gpus}
    assert len(by_uuid) == len(snapshot.gpus)
    for gpu in snapshot.gpus:
        if gpu.parent_uuid:
            assert by_uuid[gpu.parent_uuid].state == DIVIDED
            assert not gpu.reading.HasField("utilization_percent")


def has(snapshot: types_api.Snapshot, parts: int) -> bool:
    """Whether each GPU has so many instances, and what does work was read, its counters twice."""
    found = [gpu for gpu in snapshot.gpus if gpu.parent_uuid]
    works = [gpu for gpu in snapshot.gpus if gpu.parent_uuid or not parts]
    states = {gpu.state for gpu in snapshot.gpus if not gpu.parent_uuid}
    counted = all(gpu.state == OK and gpu.reading.HasField("sm_activity_percent") for gpu in works)
    return len(found) == GPUS * parts and states == {DIVIDED if parts else OK} and counted


async def test_instances_come_and_go_under_load(nvml_double: NvmlDouble) -> None:
    nvml_double.gpus, listen = wired_gpus(GPUS), f"127.0.0.1:{free_port()}"
    patient = {"soft_deadline_seconds": 20.0, "hard_deadline_seconds": 60.0}  # for a busy machine
    for gpu in nvml_double.gpus:
        gpu.processes = [DoubleProcess(4000 + number) for number in range(5)]
    divide(nvml_double, 0)
    async with (
        running_fleet() as fleet,
        site(nvml_double, fleet_address=fleet.address, metrics_listen=listen, **patient) as one,
        watched(one) as seen,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        await one.until_all(OK, GPUS)
        for parts in (PARTS, 3, 0):
            divide(nvml_double, parts)
            before = seen[0]
            snapshot = await one.until(lambda found, parts=parts: has(found, parts), timeout=120)
            assert seen[0] > before
            for gpu in (gpu for gpu in snapshot.gpus if gpu.parent_uuid):
                _, whole, number = gpu.uuid.split("-")
                wanted = nvml_double.gpus[int(whole)]
                assert (gpu.parent_uuid, gpu.index) == (wanted.uuid, int(whole))
                assert (gpu.gpu_instance_id, gpu.mig_profile) == (int(number), "1g.10gb")
                reading = gpu.reading
                assert reading.memory_used_bytes == int(number) * GIB
                shares = {getattr(reading, name) for name in GPM_METRICS if name.endswith("_percent")}
                assert shares == {10.0 * (int(whole) + 1) + int(number)}

            async def fresh() -> str:
                """A page with readings: on a busy machine the snapshot may have grown old."""
                page = (await client.get(f"http://{listen}/metrics", timeout=60)).text
                return page if named(page, "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE") else ""

            text = await eventually(fresh, timeout=120)
            tensor = named(text, "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE")
            profiles = Counter(sample.labels.get("GPU_I_PROFILE", "") for sample in tensor)
            assert profiles == ({"1g.10gb": GPUS * parts} if parts else {"": GPUS})
            assert len({tuple(sample.labels.items()) for sample in tensor}) == len(tensor)
            assert len(named(text, "DCGM_FI_DEV_GPU_UTIL")) == (0 if parts else GPUS)

            async def arrived(parts: int = parts) -> bool:
                listed = await fleet.stub.ListNodes(monitor_api.ListNodesRequest())
                return has(listed.nodes[0].snapshot, parts)

            await eventually(arrived, timeout=120)
        assert [gpu.reading.utilization_percent for gpu in (await one.snapshot()).gpus] == [90.0] * GPUS
