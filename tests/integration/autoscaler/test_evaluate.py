"""Presets, evaluations and backtests over gRPC: what is stated counts, the rest is live, and nothing is stored."""

from typing import Any

import grpc
import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.common.rpc.status import from_rpc_error
from gpuscale.common.wire import to_duration
from tests.support.asking_autoscaler import Asking
from tests.support.autoscaler_app import TIMEOUT, reason, scaling
from tests.support.waiting import eventually

STEADY = [float(second) for second in range(300)]


def workload(**more: Any) -> api.BacktestRequest:
    request = api.BacktestRequest(
        arrivals=STEADY, service_seconds=[4.0] * len(STEADY), goal=to_duration(5), slots=2, max_gpus=8
    )
    request.MergeFrom(api.BacktestRequest(**more))
    return request


def preset(name: str, **wish: Any) -> api.BacktestPolicy:
    return api.BacktestPolicy(name=name, preset=api.PresetWish(preset=name, **wish))


async def test_what_is_not_stated_comes_from_the_live_endpoint_and_nothing_is_stored(asked: Asking) -> None:
    live = asked.autoscaler
    live.watchers.queues["jobs"] = (3, 2)
    endpoint = scaling(low=1)
    endpoint.spec.tick.CopyFrom(to_duration(3600))
    await live.create(endpoint)
    await eventually(live.history)
    found = await asked.evaluate(api.EvaluateRequest(name="endpoints/e"))
    assert [(one.signal, one.value) for one in found.decision.observations] == [("depth", 5.0)]
    assert (found.decision.before, found.decision.wanted, found.decision.name) == (1, 1, "")
    stated = api.EvaluateRequest(name="endpoints/e", signals=[api.StatedSignal(signal="depth", value=11)])
    more = await asked.evaluate(stated)
    assert (more.decision.wanted, list(more.effective_rules)) == (2, ["up"])
    assert more.next_change.wanted == 3
    bounded = await asked.evaluate(
        api.EvaluateRequest(
            name="endpoints/e", before=4, signals=[api.StatedSignal(signal="depth", value=11)]
        )
    )
    assert [(one.code, one.wanted) for one in bounded.alternatives] == [
        (api.DecisionCode.DECISION_CODE_CLAMPED_TO_MAX, 5)
    ]
    assert (await live.status()).desired_replicas == 1
    assert len(await live.history()) == 1


async def test_another_spec_is_asked_about_with_the_signals_it_shares(asked: Asking) -> None:
    live = asked.autoscaler
    live.watchers.queues["jobs"] = (30, 0)
    await live.create(scaling(low=1))
    changed = api.EndpointSpec()
    changed.CopyFrom(scaling(low=3).spec)
    changed.signals.add(
        id="other", queue=api.QueueSignal(watcher="watchers/other", count=api.QueueCount.QUEUE_COUNT_READY)
    )
    found = await asked.evaluate(api.EvaluateRequest(name="endpoints/e", spec=changed, before=1))
    assert found.decision.wanted == 3
    status = {one.signal: one.status for one in found.decision.observations}
    assert status == {"depth": api.Observation.STATUS_OK, "other": api.Observation.STATUS_MISSING}


async def test_a_question_that_makes_no_sense_is_refused(asked: Asking) -> None:
    wrong, unknown = "INVALID_ARGUMENT", api.StatedRuleChange(rule="u")
    for request, code, field in (
        (api.EvaluateRequest(), wrong, "name"),
        (api.EvaluateRequest(name="endpoints/none"), "NOT_FOUND", ""),
        (
            api.EvaluateRequest(spec=scaling().spec, signals=[api.StatedSignal(signal="dept", value=1)]),
            wrong,
            "signals[0].signal",
        ),
        (
            api.EvaluateRequest(spec=scaling().spec, past=api.StatedPast(rule_changes=[unknown])),
            wrong,
            "past.rule_changes[0].rule",
        ),
        (api.EvaluateRequest(spec=scaling(low=9, high=4).spec), wrong, "spec.max_replicas"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asked.evaluate(request)
        assert reason(caught.value)[0] == code
        if field:
            assert [one.field for one in from_rpc_error(caught.value).violations] == [field]


async def test_a_backtest_tells_the_figures_of_each_policy_beside_the_work_alone(asked: Asking) -> None:
    request = workload(
        policies=[
            preset("gpuscale"),
            preset("keda"),
            api.BacktestPolicy(name="two", spec=api.EndpointSpec(min_replicas=2, max_replicas=2)),
        ]
    )
    found = await asked.backtests.Backtest(request, timeout=TIMEOUT)
    ours, keda, two = found.reports
    assert [one.name for one in found.reports] == ["gpuscale", "keda", "two"]
    assert found.work_gpu_hours == pytest.approx(300 * 4 / 2 / 3600)
    assert ours.violation_percent < keda.violation_percent
    assert (two.change_count, two.most_replicas, two.request_count) == (0, 2, 300)
    timeline = ours.timeline
    assert len(timeline.seconds) == len(timeline.wanted) == len(timeline.ready) == len(timeline.waiting) > 10
    assert max(timeline.wanted) == ours.most_replicas
    again = await asked.backtests.Backtest(request, timeout=TIMEOUT)
    assert again == found


async def test_a_backtest_ends_by_its_deadline(asked: Asking) -> None:
    endless = api.EndpointSpec(min_replicas=1, max_replicas=1, tick=to_duration(0.1))
    long = api.BacktestRequest(
        policies=[api.BacktestPolicy(name="p", spec=endless)],
        arrivals=[0.0, 90_000.0],
        service_seconds=[1.0, 1.0],
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asked.backtests.Backtest(long, timeout=0.7)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
