"""A whole agent over the double of the driver, and how many calls it makes."""

import re

import grpc
import pytest

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types.v1 import GpuState, ReadingStatus
from gpuscale.common.wire import to_duration
from gpuscale.monitor.agent.nvml import NvmlSource
from tests.support.nvml_double import GIB, DoubleProcess, NvmlDouble, wired_gpus
from tests.support.nvml_site import FRESH_SECONDS, HUNG, OK, ages, site


async def test_the_driver_can_be_released_and_taken_again(eight: NvmlDouble) -> None:
    async with site(eight) as one:
        await one.until_all(OK)
        request = monitor_api.ReleaseDriverRequest(max_duration=to_duration(600), reason="MIG change")
        await one.driver.ReleaseDriver(request, timeout=60)
        started = eight.calls("nvmlInitWithFlags")
        assert eight.calls("nvmlShutdown") == started > 0, "an open handle would block what is to be done"
        before = eight.calls()
        snapshot = await one.until_all(GpuState.GPU_STATE_RELEASED)
        assert snapshot.gpus[0].reading.HasField("memory_free_bytes"), "the last reading stays"
        assert "MIG change" in snapshot.gpu_problem
        again = await one.until(lambda later: later.seq > snapshot.seq)
        assert ages(again)[0] > ages(snapshot)[0]
        assert eight.calls() == before, "nothing is asked of a driver that is released"
        assert (await one.driver.ResumeDriver(monitor_api.ResumeDriverRequest(), timeout=30)).was_released
        await one.until_all(OK)
        assert not (await one.driver.ResumeDriver(monitor_api.ResumeDriverRequest(), timeout=30)).was_released


async def test_a_released_driver_is_taken_again_when_its_time_is_over(eight: NvmlDouble) -> None:
    async with site(eight) as one:
        await one.until_all(OK)
        request = monitor_api.ReleaseDriverRequest(max_duration=to_duration(0.5), reason="reset")
        await one.driver.ReleaseDriver(request, timeout=60)
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
            await one.driver.ReleaseDriver(request, timeout=60)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        await one.until(lambda snapshot: snapshot.gpus[1].state == OK)
        eight.release_all()


async def test_a_hung_call_keeps_no_other_gpu_waiting_is_the_last_one_and_is_recovered_from(
    eight: NvmlDouble,
) -> None:
    async with site(eight) as one:
        await one.until_all(OK)
        eight.hold(eight.gpus[0].rules, "nvmlDeviceGetPowerUsage")
        eight.gpus[1].utilization_percent = 77
        eight.write()
        hung = await one.until(lambda found: [gpu.state for gpu in found.gpus] == [HUNG, *[OK] * 7])
        assert not hung.gpus[0].reading.HasField("memory_free_bytes")
        assert hung.gpus[0].reading.absent_readings[0].status == ReadingStatus.READING_STATUS_TIMEOUT
        calls = eight.calls(gpu=0)
        later = await one.until(lambda found: found.seq > hung.seq + 10)
        assert later.gpus[1].reading.utilization_percent == 77
        assert max(ages(later)[1:]) < FRESH_SECONDS < ages(later)[0]
        assert eight.calls(gpu=0) == calls
        eight.gpus[0].rules.holds.clear()
        eight.write()
        eight.release_all()
        await one.until_all(OK)


def test_eight_gpus_cost_at_most_a_hundred_calls_per_tick(nvml_double: NvmlDouble) -> None:
    """With two processes each; only the first tick, in which everything is due, may cost more."""
    nvml_double.gpus = wired_gpus(8)
    for gpu in nvml_double.gpus:
        gpu.processes = [DoubleProcess(2, GIB), DoubleProcess(3, GIB)]
    nvml_double.write()
    now = 0.0
    source = NvmlSource(lambda: now)
    source.open()
    costs: list[int] = []
    for second in range(60):
        now = float(second)
        before = nvml_double.calls()
        samples = [source.read(gpu.uuid) for gpu in nvml_double.gpus]
        costs.append(nvml_double.calls() - before)
        # What the agent says of itself. Where NVLinks lead is asked in the first tick and is no reading; a list that
        # holds processes pynvml asks for twice, first for its length.
        counted = sum(sample.calls for sample in samples)
        assert second == 0 or counted in {costs[-1], costs[-1] - len(samples)}
    assert sum(costs) / len(costs) <= 80
    assert max(costs[1:]) <= 100
    assert nvml_double.calls("nvmlInitWithFlags") == 1  # it is dear without persistence mode
    names = {count.function for count in nvml_double.call_counts()}
    assert not [name for name in names if re.match(r"nvml(?!EventSet)\w*(Set|Reset|Clear)[A-Z]", name)]
    source.close()
