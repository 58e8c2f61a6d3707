"""What is kept of an endpoint's evaluations: inputs to evaluate them again, and a workload to run again."""

import sqlite3
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from google.protobuf.unknown_fields import UnknownFieldSet

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.backtest import world
from gpuscale.common.wire import enum_word, to_duration
from tests.support.asking_autoscaler import Asking, asking
from tests.support.autoscaler_app import TIMEOUT, reason, scaling
from tests.support.waiting import eventually

OF_THE_ENDPOINT = api.BacktestRequest(
    policies=[api.BacktestPolicy(name="two", spec=api.EndpointSpec(min_replicas=2, max_replicas=2))],
    endpoint="endpoints/e",
    service_time=to_duration(2),
    goal=to_duration(60),
)


async def decided(asked: Asking) -> api.Decision:
    """The first decision of an endpoint whose queue is long."""
    asked.autoscaler.watchers.queues["jobs"] = (50, 2)
    endpoint = scaling(low=1)
    endpoint.spec.tick.CopyFrom(to_duration(0.5))
    await asked.autoscaler.create(endpoint)
    await eventually(asked.autoscaler.history)
    return (await asked.autoscaler.history())[-1]


async def verify(asked: Asking, name: str) -> api.VerifyDecisionResponse:
    return await asked.decisions.VerifyDecision(api.VerifyDecisionRequest(name=name), timeout=TIMEOUT)


async def test_every_stored_evaluation_comes_to_the_same_again_and_an_order_is_none(asked: Asking) -> None:
    await decided(asked)
    for one in await asked.autoscaler.history():
        got = await asked.decisions.GetDecision(api.GetDecisionRequest(name=one.name), timeout=TIMEOUT)
        assert not UnknownFieldSet(got.decision), "what it was evaluated from is for VerifyDecision alone"
        verdict = await verify(asked, one.name)
        assert verdict.equal, verdict.differences
        assert verdict.decision.wanted == one.wanted
    await asked.autoscaler.set_replicas(2)
    [order, *_] = [
        one for one in await asked.autoscaler.history() if enum_word(one.steps[0], "code") == "SET"
    ]
    for name, why in (
        (order.name, ("FAILED_PRECONDITION", "DECISION_WITHOUT_INPUTS")),
        ("endpoints/e/decisions/0000000000099999", ("NOT_FOUND", "NOT_FOUND")),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await verify(asked, name)
        assert reason(refused.value) == why


async def test_a_backtest_runs_on_what_arrived_at_an_endpoint(
    asked: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "SPACING", 0.2)
    await decided(asked)
    request = api.BacktestRequest()
    request.CopyFrom(OF_THE_ENDPOINT)

    async def found() -> api.BacktestResponse:
        return await asked.backtests.Backtest(request, timeout=TIMEOUT)

    response = await eventually(found, retry_on=(grpc.aio.AioRpcError,))
    assert response.reports[0].request_count >= 52, "those that were there at first, at least"
    request.ClearField("service_time")
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await found()
    assert reason(unknown.value) == ("FAILED_PRECONDITION", "NO_HISTORY"), (
        "the watcher tells no rates to learn it from"
    )
    request.endpoint = "endpoints/other"
    with pytest.raises(grpc.aio.AioRpcError) as missing:
        await found()
    assert missing.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_history_outlives_the_program_and_goes_with_its_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "SPACING", 0.1)
    monkeypatch.setattr(world, "LONGEST_HELD", 0.0)  # each is kept, though the queue stays as it is
    async with asking(tmp_path) as asked:
        await decided(asked)
        await eventually(lambda: rows(tmp_path) > 2)
    monkeypatch.setattr(world, "SPACING", 3600.0)  # now it is noted once at most, which is no history
    async with asking(tmp_path) as asked:
        response = await asked.backtests.Backtest(OF_THE_ENDPOINT, timeout=TIMEOUT)
        assert response.reports[0].request_count >= 52
        await asked.autoscaler.delete()
        await eventually(lambda: rows(tmp_path) == 0)


def rows(folder: Path) -> int:
    with closing(sqlite3.connect(folder / "autoscaler.db")) as connection:
        [(count,)] = connection.execute("SELECT count(*) FROM readingrow")
    return int(count)


async def test_endpoints_with_workloads_of_their_own_share_gpus(asked: Asking) -> None:
    work = api.Workload(arrivals=[0, 0, 300], service_seconds=[60, 60, 1])
    policies = [
        api.BacktestPolicy(name=name, preset=api.PresetWish(preset="hpa", min_replicas=0), workload=work)
        for name in ("first", "second")
    ]
    request = api.BacktestRequest(policies=policies, max_gpus=2, shared_gpus=True, goal=to_duration(5))
    found = await asked.backtests.Backtest(request, timeout=TIMEOUT)
    first, second = found.reports
    assert second.wait_p99_seconds > first.wait_p99_seconds + 30
    assert found.work_gpu_hours == pytest.approx(2 * 121 / 3600)
    request.policies[1].workload.service_seconds.pop()
    with pytest.raises(grpc.aio.AioRpcError) as wrong:
        await asked.backtests.Backtest(request, timeout=TIMEOUT)
    assert "policies[1].workload.service_seconds" in (wrong.value.details() or "")
