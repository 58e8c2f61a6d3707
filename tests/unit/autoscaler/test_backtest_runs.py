"""Backtests run in a thread, one at a time, and end with whoever asked for them; one that makes no sense is refused."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.backtest.simulate import Part
from gpuscale.autoscaler.backtest.world import Setting
from gpuscale.autoscaler.domain.spec import EndpointSpec, ReplicaTemplate
from gpuscale.autoscaler.servicers.backtest_jobs import BacktestJob, job_from_wire, requests_from_wire
from gpuscale.autoscaler.servicers.backtests import run_within
from gpuscale.client.traces import Request
from gpuscale.common.errors import InvalidArgumentError, ResourceExhaustedError
from gpuscale.common.wire import to_duration
from tests.support.waiting import eventually


def job(last: float) -> BacktestJob:
    spec = EndpointSpec(1, 1, ReplicaTemplate("worker"), tick=0.1)
    setting = Setting(1, lambda _number: 1.0)
    part = Part(spec, [Request(0.0, 1.0), Request(last, 1.0)], setting)
    return BacktestJob([part] * 64, 5.0, datetime(2024, 1, 1, tzinfo=UTC))


async def test_one_at_a_time_and_no_longer_than_its_caller() -> None:
    """A run that nobody waits for any more makes room for the next."""
    turn = asyncio.Lock()
    first = asyncio.create_task(run_within(job(90_000.0), 60.0, turn))
    await asyncio.sleep(0)  # it begins
    with pytest.raises(ResourceExhaustedError) as refused:
        await run_within(job(1.0), 60.0, turn)
    assert refused.value.reason == "BACKTEST_RUNNING"
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    reports = await eventually(
        lambda: run_within(job(1.0), 60.0, turn), timeout=60, retry_on=(ResourceExhaustedError,)
    )
    assert len(reports) == 64


def preset(name: str) -> api.BacktestPolicy:
    return api.BacktestPolicy(name=name, preset=api.PresetWish(preset=name, min_replicas=0))


def workload(**more: Any) -> api.BacktestRequest:
    return api.BacktestRequest(**{"arrivals": [0.0, 9.0], "service_seconds": [4.0] * 2, **more})


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (workload(), "policies"),
        (api.BacktestRequest(policies=[preset("keda")]), "arrivals"),
        (workload(policies=[preset("keda")], service_seconds=[1.0]), "service_seconds"),
        (api.BacktestRequest(policies=[preset("keda")], arrivals=[2, 1], service_seconds=[1, 1]), "arrivals"),
        (workload(policies=[preset("keda"), preset("keda")]), "policies[1].name"),
        (workload(policies=[preset("kda")]), "policies[0].preset.preset"),
        (workload(policies=[api.BacktestPolicy(name="none")]), "policies[0].spec"),
        (
            api.BacktestRequest(policies=[preset("knative")], arrivals=[2_500_000], service_seconds=[1]),
            "policies[0]",
        ),
        (
            workload(policies=[preset("keda")], min_cold_start=to_duration(9), max_cold_start=to_duration(8)),
            "max_cold_start",
        ),
        (
            workload(policies=[api.BacktestPolicy(name="x", spec=api.EndpointSpec(min_replicas=3))]),
            "policies[0].spec.max_replicas",
        ),
    ],
)
def test_a_backtest_that_cannot_be_run_is_refused(request_: api.BacktestRequest, field: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        job_from_wire(request_, requests_from_wire(request_))
    assert [one.field for one in refused.value.violations] == [field]


def test_cold_starts_between_two_bounds_follow_the_seed() -> None:
    def drawn(seed: int) -> list[float]:
        bounds = {"min_cold_start": to_duration(10), "max_cold_start": to_duration(60)}
        asked = workload(policies=[preset("keda")], seed=seed, **bounds)
        [part] = job_from_wire(asked, requests_from_wire(asked)).parts
        return [part.setting.cold_start(number) for number in range(50)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert 10 <= min(drawn(1)) < max(drawn(1)) <= 60
