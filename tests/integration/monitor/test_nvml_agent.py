"""A whole agent over the NVML double, by its RPCs: what it says while a GPU, or the driver, misbehaves."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc
import pytest

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.api.types.v1 import GpuState
from gpuscale.common.channel import open_channel
from gpuscale.common.wire import seconds, to_duration
from tests.support.monitor import running_agent
from tests.support.nvml_double import GIB, DoubleGpu, NvmlDouble, NvmlReturn, wired_gpus
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from gpuscale.api.monitor.v1.agent_service_pb2_grpc import AgentServiceAsyncStub
    from gpuscale.api.monitor.v1.driver_service_pb2_grpc import DriverServiceAsyncStub
    from gpuscale.api.monitor.v1.work_service_pb2_grpc import WorkServiceAsyncStub

OK, HUNG, LOST = GpuState.GPU_STATE_OK, GpuState.GPU_STATE_HUNG, GpuState.GPU_STATE_LOST
# What a caller may wait while a GPU hangs for ever: far less than any deadline of the driver's.
PROMPT_SECONDS = 1.0
FRESH_SECONDS = 2.0


class Site:
    """An agent, its double, and its services."""

    def __init__(self, double: NvmlDouble, agent: "AgentServiceAsyncStub", channel: grpc.aio.Channel) -> None:
        self.double = double
        self.agent = agent
        self.driver: DriverServiceAsyncStub = monitor_api.DriverServiceStub(channel)
        self.work: WorkServiceAsyncStub = monitor_api.WorkServiceStub(channel)

    async def snapshot(self) -> types_api.Snapshot:
        """The newest snapshot, which must come promptly whatever the driver does."""
        answer = await self.agent.GetSnapshot(monitor_api.GetSnapshotRequest(), timeout=5)
        return answer.snapshot

    async def until(
        self, check: Callable[[types_api.Snapshot], bool], timeout: float = 10.0
    ) -> types_api.Snapshot:
        """The first snapshot that satisfies the check."""

        async def satisfied() -> types_api.Snapshot | None:
            snapshot = await self.snapshot()
            return snapshot if check(snapshot) else None

        found = await eventually(satisfied, timeout=timeout)
        assert found is not None
        return found

    async def until_all(self, state: GpuState.ValueType, count: int = 8) -> types_api.Snapshot:
        """Wait until so many GPUs all have that state."""
        return await self.until(lambda one: [gpu.state for gpu in one.gpus] == [state] * count)

    async def slowest(self, calls: int = 20) -> float:
        """The longest that any of some calls in a row took."""
        loop = asyncio.get_running_loop()
        slowest = 0.0
        for _ in range(calls):
            began = loop.time()
            await self.snapshot()
            slowest = max(slowest, loop.time() - began)
        return slowest


@asynccontextmanager
async def site(double: NvmlDouble, **settings: object) -> AsyncGenerator[Site, None]:
    """An agent on the double, with deadlines that a test can wait for."""
    channels: list[grpc.aio.Channel] = []

    def channel_to(address: str) -> grpc.aio.Channel:
        channels.append(open_channel(address))
        return channels[-1]

    deadlines = {"period_seconds": 0.1, "soft_deadline_seconds": 0.5, "hard_deadline_seconds": 1.5}
    async with running_agent(channel_to=channel_to, source="nvml", **{**deadlines, **settings}) as agent:
        yield Site(double, agent, channels[0])


@pytest.fixture
def eight(nvml_double: NvmlDouble) -> NvmlDouble:
    """A machine with eight healthy GPUs on a switch."""
    nvml_double.gpus = wired_gpus(8)
    nvml_double.write()
    return nvml_double


def ages(snapshot: types_api.Snapshot) -> list[float]:
    return [seconds(gpu.reading.age) for gpu in snapshot.gpus]


async def test_eight_healthy_gpus_are_all_there_with_every_reading(eight: NvmlDouble) -> None:
    async with site(eight) as one:
        snapshot = await one.until_all(OK)
    assert [gpu.uuid for gpu in snapshot.gpus] == [gpu.uuid for gpu in eight.gpus]
    assert [list(gpu.reading.absent_readings) for gpu in snapshot.gpus] == [[]] * 8
    assert max(ages(snapshot)) < FRESH_SECONDS
    assert {len(gpu.nvlinks) for gpu in snapshot.gpus} == {7}
    assert snapshot.gpu_problem == ""


async def test_a_hung_call_delays_neither_the_other_gpus_nor_an_answer_and_is_recovered_from(
    eight: NvmlDouble,
) -> None:
    async with site(eight) as one:
        await one.until_all(OK)
        release = eight.hold(eight.gpus[0].rules, "nvmlDeviceGetPowerUsage")
        eight.write()
        snapshot = await one.until(lambda snapshot: snapshot.gpus[0].state == HUNG)
        assert [gpu.state for gpu in snapshot.gpus[1:]] == [OK] * 7
        assert max(ages(snapshot)[1:]) < FRESH_SECONDS
        assert not snapshot.gpus[0].reading.HasField("memory_free_bytes")
        assert await one.slowest() < PROMPT_SECONDS
        eight.gpus[0].rules.holds.clear()
        eight.write()
        release.touch()
        await one.until_all(OK)


async def test_a_slow_gpu_is_said_to_be_slow_and_slows_no_other(eight: NvmlDouble) -> None:
    eight.gpus[3].delay(200)
    eight.write()
    async with site(eight, hard_deadline_seconds=30.0) as one:
        snapshot = await one.until(
            lambda snapshot: len(snapshot.gpus) == 8 and snapshot.gpus[3].reading.HasField("power_watts"),
            20.0,
        )
        assert snapshot.gpus[3].state == GpuState.GPU_STATE_SLOW
        others = [gpu for gpu in snapshot.gpus if gpu.index != 3]
        assert {gpu.state for gpu in others} == {OK}
        assert max(seconds(gpu.reading.age) for gpu in others) < FRESH_SECONDS
        assert await one.slowest() < PROMPT_SECONDS


async def test_a_lost_gpu_is_lost_alone(eight: NvmlDouble) -> None:
    async with site(eight) as one:
        await one.until_all(OK)
        eight.gpus[5].fail("*", NvmlReturn.GPU_IS_LOST)
        eight.write()
        snapshot = await one.until(lambda snapshot: snapshot.gpus[5].state == LOST)
        assert [gpu.index for gpu in snapshot.gpus if gpu.state == OK] == [0, 1, 2, 3, 4, 6, 7]
        assert {reading.status for reading in snapshot.gpus[5].reading.absent_readings} == {
            types_api.ReadingStatus.READING_STATUS_LOST
        }


async def test_a_reloaded_driver_is_read_again_within_seconds(eight: NvmlDouble) -> None:
    async with site(eight) as one:
        await one.until_all(OK)
        seq = (await one.snapshot()).seq
        eight.gpus[0].utilization_percent = 60
        eight.reload_driver()
        snapshot = await one.until(
            lambda snapshot: (
                snapshot.seq > seq
                and snapshot.gpus[0].reading.utilization_percent == 60
                and all(gpu.state == OK for gpu in snapshot.gpus)
            )
        )
    assert snapshot.gpu_problem == ""


async def test_a_driver_that_is_not_there_is_said_and_found_when_it_comes(eight: NvmlDouble) -> None:
    eight.fail_start(NvmlReturn.DRIVER_NOT_LOADED)
    eight.write()
    async with site(eight) as one:
        snapshot = await one.until(lambda snapshot: snapshot.host_reading.HasField("cpu_percent"))
        assert snapshot.gpu_problem == "NVML: Driver Not Loaded"
        assert list(snapshot.gpus) == []
        eight.fail_start(NvmlReturn.SUCCESS)
        eight.write()
        snapshot = await one.until(lambda snapshot: len(snapshot.gpus) == 8, 40.0)
        assert snapshot.gpu_problem == ""


async def test_with_one_lock_in_the_driver_nothing_is_read_and_everything_answered(eight: NvmlDouble) -> None:
    """Threads do not help against a driver that serves one call at a time: the truth about it does."""
    async with site(eight) as one:
        await one.until_all(OK)
        eight.driver_lock = True
        release = eight.hold(eight.gpus[0].rules, "nvmlDeviceGetPowerUsage")
        eight.write()
        snapshot = await one.until_all(HUNG)
        assert seconds(snapshot.host_reading.age) < FRESH_SECONDS
        assert await one.slowest() < PROMPT_SECONDS
        eight.gpus[0].rules.holds.clear()
        eight.driver_lock = False
        eight.write()
        release.touch()
        await one.until_all(OK)


async def test_mig_instances_are_gpus_of_their_own_and_their_gpu_is_not_offered(eight: NvmlDouble) -> None:
    eight.gpus[1].mig_mode = 1
    eight.gpus[1].mig_devices = [mig(0), mig(1)]
    eight.write()
    async with site(eight) as one:
        snapshot = await one.until(lambda snapshot: len(snapshot.gpus) == 10)
        by_uuid = {gpu.uuid: gpu for gpu in snapshot.gpus}
        parent, part = by_uuid[eight.gpus[1].uuid], by_uuid["MIG-0"]
        assert parent.state == GpuState.GPU_STATE_DIVIDED
        assert not parent.reading.HasField("utilization_percent"), "absent, and never 0"
        assert part.state == OK
        assert (part.parent_uuid, part.mig_profile) == (parent.uuid, "1g.10gb")
        assert part.reading.memory_total_bytes == 10 * GIB
        assert not part.reading.HasField("utilization_percent")


async def test_the_driver_can_be_released_and_taken_again(eight: NvmlDouble) -> None:
    async with site(eight) as one:
        await one.until_all(OK)
        request = monitor_api.ReleaseDriverRequest(max_duration=to_duration(600), reason="MIG change")
        await one.driver.ReleaseDriver(request, timeout=15)
        before = eight.calls()
        snapshot = await one.until_all(GpuState.GPU_STATE_RELEASED)
        assert snapshot.gpus[0].reading.HasField("memory_free_bytes"), "the last reading stays"
        assert "MIG change" in snapshot.gpu_problem
        again = await one.until(lambda later: later.seq > snapshot.seq)
        assert ages(again)[0] > ages(snapshot)[0]
        assert eight.calls() == before, "nothing is asked of a driver that is released"
        assert (await one.driver.ResumeDriver(monitor_api.ResumeDriverRequest(), timeout=5)).was_released
        await one.until_all(OK)
        assert not (await one.driver.ResumeDriver(monitor_api.ResumeDriverRequest(), timeout=5)).was_released


async def test_a_released_driver_is_taken_again_when_its_time_is_over(eight: NvmlDouble) -> None:
    async with site(eight) as one:
        await one.until_all(OK)
        request = monitor_api.ReleaseDriverRequest(max_duration=to_duration(0.5), reason="reset")
        await one.driver.ReleaseDriver(request, timeout=15)
        await one.until_all(OK)


async def test_a_driver_that_holds_a_call_is_not_released(
    eight: NvmlDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuscale.monitor.agent.gpus.RELEASE_SECONDS", 0.5)
    async with site(eight) as one:
        await one.until_all(OK)
        eight.hold(eight.gpus[0].rules)
        eight.write()
        await one.until(lambda snapshot: snapshot.gpus[0].state == HUNG)
        request = monitor_api.ReleaseDriverRequest(max_duration=to_duration(60), reason="reset")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await one.driver.ReleaseDriver(request, timeout=15)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        await one.until(lambda snapshot: snapshot.gpus[1].state == OK)
        eight.release_all()


def mig(number: int) -> DoubleGpu:
    """A MIG instance of 10 GiB."""
    return DoubleGpu(
        uuid=f"MIG-{number}",
        name="NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        memory_total_bytes=10 * GIB,
        gpu_instance=7 + number,
        compute_instance=0,
    )
