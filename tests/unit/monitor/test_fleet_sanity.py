"""Snapshots that cannot be true are refused, with the field that is at fault."""

import math

import pytest

from gpuscale.api.types import v1 as types_api
from gpuscale.common.wire import to_duration
from gpuscale.monitor.fleet.validation import refuse_snapshot
from tests.support.monitor_values import GIB, epoch_id, gpu, snapshot


def refusal(message: types_api.Snapshot) -> str:
    return refuse_snapshot(message, "alpha", epoch_id(1))


def reading(**fields: float) -> types_api.Snapshot:
    one = gpu()
    for name, value in fields.items():
        setattr(one.reading, name, value)
    return snapshot(gpus=(one,))


def test_a_healthy_snapshot_is_taken() -> None:
    assert refusal(snapshot()) == ""
    assert refusal(snapshot(gpus=())) == ""
    assert refusal(snapshot(gpus=(gpu("GPU-1"), gpu("GPU-2")))) == ""


def test_readings_that_are_absent_are_no_reason_to_refuse() -> None:
    bare = types_api.Gpu(uuid="GPU-1", state=types_api.GpuState.GPU_STATE_HUNG)
    assert refusal(snapshot(gpus=(bare,))) == ""


@pytest.mark.parametrize("percent", [-1.0, 100.1, math.nan, math.inf])
def test_a_utilization_outside_of_0_to_100_is_refused(percent: float) -> None:
    assert refusal(reading(utilization_percent=percent)).startswith("gpus[0].reading.utilization_percent")


@pytest.mark.parametrize(
    ("fields", "at_fault"),
    [
        ({"memory_total_bytes": 0}, "memory_total_bytes"),
        ({"memory_free_bytes": 81 * GIB}, "memory_free_bytes"),
        ({"memory_free_bytes": -1}, "memory_free_bytes"),
        ({"memory_used_bytes": 20 * GIB}, "memory_used_bytes"),
        ({"power_watts": -1.0}, "power_watts"),
    ],
)
def test_memory_and_power_that_cannot_be_are_refused(fields: dict[str, float], at_fault: str) -> None:
    assert f"reading.{at_fault}" in refusal(reading(**fields))


def test_memory_read_while_it_changes_is_taken() -> None:
    """Free and used are not read at one moment: a few percent too much is no lie."""
    assert refusal(reading(memory_free_bytes=70 * GIB, memory_used_bytes=13 * GIB)) == ""


@pytest.mark.parametrize("other", [snapshot("beta"), snapshot(epoch=2)])
def test_a_snapshot_of_another_node_or_run_than_hello_is_refused(other: types_api.Snapshot) -> None:
    assert refusal(other) == "its node and epoch are not those of Hello"


def test_one_gpu_twice_is_refused_whatever_the_case_of_its_uuid() -> None:
    assert refusal(snapshot(gpus=(gpu("GPU-1a"), gpu("gpu-1A")))) == "gpus[1] has the UUID of another one"


def test_a_period_that_hides_staleness_is_refused() -> None:
    message = snapshot()
    message.period.CopyFrom(to_duration(4000))
    assert "period" in refusal(message)
    message.ClearField("period")
    assert "period" in refusal(message)


def test_more_gpus_than_a_node_can_have_are_refused() -> None:
    assert refusal(snapshot(gpus=tuple(gpu(f"GPU-{n}") for n in range(1025)))).startswith("gpus ")
