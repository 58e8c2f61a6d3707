"""An agent on a host whose driver misbehaves: it goes on answering, and says what is wrong with which GPU."""

import asyncio
import time
from typing import TYPE_CHECKING

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.common.wire import seconds, to_duration
from tests.support.monitor import running_agent, running_fleet
from tests.support.nvml_double import NvmlDouble, NvmlReturn
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from gpuscale.api.monitor.v1.agent_service_pb2_grpc import AgentServiceAsyncStub

State = types_api.GpuState
PERIOD = 0.1
# The deadlines of a real agent are 2 s and 10 s.
REAL = {
    "source": "nvml",
    "period_seconds": PERIOD,
    "soft_deadline_seconds": 0.3,
    "hard_deadline_seconds": 0.8,
}


async def snapshot(agent: "AgentServiceAsyncStub", max_age: float = 0.0) -> types_api.Snapshot:
    request = monitor_api.GetSnapshotRequest(max_age=to_duration(max_age))
    return (await agent.GetSnapshot(request, timeout=5)).snapshot


async def until(agent: "AgentServiceAsyncStub", *states: types_api.GpuState) -> types_api.Snapshot:
    """Wait until the GPUs have these states, in their order."""
    found: list[types_api.Snapshot] = []

    async def check() -> bool:
        found[:] = [await snapshot(agent)]
        return [gpu.state for gpu in found[0].gpus] == list(states)

    await eventually(check, timeout=20.0)
    return found[0]


async def test_a_hung_gpu_delays_neither_the_other_gpu_nor_an_answer(nvml_double: NvmlDouble) -> None:
    async with running_agent(**REAL) as agent:
        await until(agent, State.GPU_STATE_OK, State.GPU_STATE_OK)
        nvml_double.hold(nvml_double.gpus[0].rules)
        nvml_double.gpus[1].utilization_percent = 77
        nvml_double.write()
        await until(agent, State.GPU_STATE_SLOW, State.GPU_STATE_OK)
        hung = await until(agent, State.GPU_STATE_HUNG, State.GPU_STATE_OK)
        assert not hung.gpus[0].reading.HasField("utilization_percent")
        assert (
            hung.gpus[0].reading.absent_readings[0].status == types_api.ReadingStatus.READING_STATUS_TIMEOUT
        )
        calls = nvml_double.calls(gpu=0)
        for _ in range(20):
            began = time.monotonic()
            one = await snapshot(agent)
            assert time.monotonic() - began < 1.0
            assert one.gpus[1].reading.utilization_percent == 77
            assert seconds(one.gpus[1].reading.age) < 1.0
        assert nvml_double.calls(gpu=0) == calls, "no further call is made on it"
        nvml_double.gpus[0].rules.holds.clear()
        nvml_double.write()
        nvml_double.release_all()
        await until(agent, State.GPU_STATE_OK, State.GPU_STATE_OK)


async def test_a_driver_that_serves_one_call_at_a_time_does_not_hold_up_answers(
    nvml_double: NvmlDouble,
) -> None:
    """One slow GPU then makes all of them slow; the agent answers at once and says so."""
    async with running_agent(**REAL) as agent:
        await until(agent, State.GPU_STATE_OK, State.GPU_STATE_OK)
        nvml_double.driver_lock = True
        nvml_double.hold(nvml_double.gpus[0].rules)
        nvml_double.write()
        await until(agent, State.GPU_STATE_HUNG, State.GPU_STATE_HUNG)
        began = time.monotonic()
        one = await snapshot(agent)
        assert time.monotonic() - began < 1.0
        assert one.host_reading.memory_total_bytes > 0


async def test_an_agent_stops_in_time_while_a_gpu_hangs(nvml_double: NvmlDouble) -> None:
    async with running_agent(**REAL) as agent:
        await until(agent, State.GPU_STATE_OK, State.GPU_STATE_OK)
        nvml_double.hold(nvml_double.gpus[0].rules)
        nvml_double.write()
        await until(agent, State.GPU_STATE_HUNG, State.GPU_STATE_OK)
        began = time.monotonic()
    assert time.monotonic() - began < 5.0


async def test_a_slow_gpu_is_said_to_be_slow_and_still_read(nvml_double: NvmlDouble) -> None:
    async with running_agent(**REAL) as agent:
        nvml_double.gpus[0].delay(400, "nvmlDeviceGetTemperature")
        nvml_double.gpus[0].temperature_celsius = 88
        nvml_double.write()

        async def slow() -> bool:
            gpu = (await snapshot(agent)).gpus[0]
            return gpu.state == State.GPU_STATE_SLOW and gpu.reading.temperature_celsius == 88

        await eventually(slow)


async def test_a_lost_gpu_is_said_and_comes_back(nvml_double: NvmlDouble) -> None:
    del nvml_double.gpus[1]
    nvml_double.write()
    async with running_agent(**REAL) as agent:
        await until(agent, State.GPU_STATE_OK)
        nvml_double.gpus[0].fail("*", NvmlReturn.GPU_IS_LOST)
        nvml_double.write()
        lost = await until(agent, State.GPU_STATE_LOST)
        assert {one.status for one in lost.gpus[0].reading.absent_readings} == {
            types_api.ReadingStatus.READING_STATUS_LOST
        }
        nvml_double.gpus[0].fail("*", NvmlReturn.SUCCESS)
        nvml_double.write()
        await until(agent, State.GPU_STATE_OK)


async def test_one_lost_gpu_of_two_leaves_the_other_alone(nvml_double: NvmlDouble) -> None:
    async with running_agent(**REAL) as agent:
        await until(agent, State.GPU_STATE_OK, State.GPU_STATE_OK)
        starts = nvml_double.calls("nvmlInitWithFlags")
        nvml_double.gpus[0].fail("*", NvmlReturn.RESET_REQUIRED)
        nvml_double.write()
        await until(agent, State.GPU_STATE_RESET_REQUIRED, State.GPU_STATE_OK)
        for _ in range(10):
            assert (await snapshot(agent)).gpus[1].state == State.GPU_STATE_OK
        assert nvml_double.calls("nvmlInitWithFlags") == starts


async def test_without_a_driver_the_host_is_served_and_a_driver_that_is_loaded_later_is_found(
    nvml_double: NvmlDouble,
) -> None:
    nvml_double.fail_start(NvmlReturn.DRIVER_NOT_LOADED)
    nvml_double.write()
    async with running_fleet() as fleet, running_agent(fleet.address, **REAL) as agent:
        one = await snapshot(agent)
        assert one.gpu_problem == "NVML: Driver Not Loaded"
        assert list(one.gpus) == []
        assert not one.simulated
        assert one.host_reading.memory_total_bytes > 0
        node = await fleet.until("alpha", monitor_api.NodeState.NODE_STATE_ONLINE)
        assert node.snapshot.gpu_problem == "NVML: Driver Not Loaded"
        nvml_double.fail_start(NvmlReturn.SUCCESS)
        nvml_double.write()
        found = await until(agent, State.GPU_STATE_OK, State.GPU_STATE_OK)
        assert found.gpu_problem == ""
        assert found.host.driver_version == "550.54.15"


async def test_a_driver_that_was_reloaded_is_read_again(nvml_double: NvmlDouble) -> None:
    async with running_agent(**REAL) as agent:
        await until(agent, State.GPU_STATE_OK, State.GPU_STATE_OK)
        nvml_double.gpus[0].utilization_percent = 60
        nvml_double.driver_version = "560.1"
        nvml_double.reload_driver()

        async def recovered() -> bool:
            one = await snapshot(agent)
            return one.gpus[0].reading.utilization_percent == 60 and one.host.driver_version == "560.1"

        await eventually(recovered, timeout=20.0)
        await until(agent, State.GPU_STATE_OK, State.GPU_STATE_OK)


async def test_a_driver_that_hangs_when_it_is_started_is_said_while_the_host_is_served(
    nvml_double: NvmlDouble,
) -> None:
    nvml_double.hold(nvml_double.rules, "nvmlInitWithFlags")
    nvml_double.write()
    async with running_agent(**REAL) as agent:

        async def said() -> bool:
            one = await snapshot(agent)
            return "has not answered" in one.gpu_problem and one.host_reading.memory_total_bytes > 0

        await eventually(said)
        nvml_double.release_all()
        await until(agent, State.GPU_STATE_OK, State.GPU_STATE_OK)


async def test_many_callers_at_once_cost_the_driver_few_readings(nvml_double: NvmlDouble) -> None:
    slow = {"source": "nvml", "period_seconds": 60.0}
    async with running_agent(**slow) as agent:
        await until(agent, State.GPU_STATE_OK, State.GPU_STATE_OK)
        nvml_double.gpus[0].delay(300, "nvmlDeviceGetTemperature")
        nvml_double.write()
        before = nvml_double.calls("nvmlDeviceGetTemperature", gpu=1)
        await asyncio.gather(*(snapshot(agent) for _ in range(50)))
        assert 1 <= nvml_double.calls("nvmlDeviceGetTemperature", gpu=1) - before <= 3
        before = nvml_double.calls()
        await asyncio.gather(*(snapshot(agent, max_age=5.0) for _ in range(50)))
        assert nvml_double.calls() == before, "a young snapshot costs none"
