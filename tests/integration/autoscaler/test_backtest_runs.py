"""Backtests run in a thread, one at a time, and end with whoever asked for them."""

import asyncio
from datetime import UTC, datetime

import pytest

from gpuscale.autoscaler.backtest.simulate import Part
from gpuscale.autoscaler.backtest.world import Setting
from gpuscale.autoscaler.domain.spec import EndpointSpec, ReplicaTemplate
from gpuscale.autoscaler.servicers.backtest_servicer import Job, Runs
from gpuscale.client.traces import Request
from gpuscale.common.errors import ResourceExhaustedError
from tests.support.waiting import eventually


def job(last: float) -> Job:
    spec = EndpointSpec(1, 1, ReplicaTemplate("worker"), tick=0.1)
    setting = Setting(1, lambda _number: 1.0)
    part = Part(spec, [Request(0.0, 1.0), Request(last, 1.0)], setting)
    return Job([part] * 64, 5.0, datetime(2024, 1, 1, tzinfo=UTC))


async def test_one_at_a_time_and_no_longer_than_its_caller() -> None:
    """A run that nobody waits for any more makes room for the next."""
    runs = Runs()
    first = asyncio.create_task(runs.run(job(90_000.0), 60.0))
    await asyncio.sleep(0)  # it begins
    with pytest.raises(ResourceExhaustedError) as refused:
        await runs.run(job(1.0), 60.0)
    assert refused.value.reason == "BACKTEST_RUNNING"
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    reports = await eventually(
        lambda: runs.run(job(1.0), 60.0), timeout=60, retry_on=(ResourceExhaustedError,)
    )
    assert len(reports) == 64
