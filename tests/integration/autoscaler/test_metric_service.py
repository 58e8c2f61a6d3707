"""Metrics that programs report: who may, of what, and what becomes of them in a decision."""

from pathlib import Path

import grpc
import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.common.rpc.status import from_rpc_error
from gpuscale.common.security.auth import Authenticator
from gpuscale.common.wire import seconds, to_duration
from tests.support import autoscaler_app
from tests.support.autoscaler_app import TIMEOUT, Autoscaler, endpoint, reason, running
from tests.support.fake_adapter import FAILED, FakeAdapter
from tests.support.fake_allocator import FakeAllocator, serving
from tests.support.tokens import bearer, write_tokens
from tests.support.waiting import eventually


async def report(
    one: Autoscaler, name: str, value: float, *, metric: str = "busy", age: float = 0.0, who: str = ""
) -> None:
    values = [api.MetricValue(metric=metric, value=value, age=to_duration(age))]
    await one.metrics.ReportMetrics(
        api.ReportMetricsRequest(name=name, values=values),
        metadata=grpc.aio.Metadata(*bearer(who)) if who else None,
        timeout=TIMEOUT,
    )


async def listed(one: Autoscaler, parent: str = "") -> list[tuple[str, str, float]]:
    found, asked = list[api.ReportedMetric](), api.ListMetricsRequest(parent=parent, page_size=1)
    for _ in range(99):
        page = await one.metrics.ListMetrics(asked, timeout=TIMEOUT)
        found, asked.page_token = [*found, *page.metrics], page.next_page_token
        if not page.next_page_token:
            break
    return [(item.name, item.value.metric, item.value.value) for item in found]


def of_replicas() -> api.Endpoint:
    """An endpoint of two replicas and more that keeps what they report as `busy` at 50."""
    wanted = endpoint(low=2, high=8)
    signal = api.Signal(id="busy", replicas=api.ReplicaSignal(metric="busy"), max_age=to_duration(60))
    target = api.TargetRule(value=50, type=api.TargetType.TARGET_TYPE_VALUE)
    wanted.spec.signals.append(signal)
    wanted.spec.rules.append(api.Rule(id="t", signal="busy", target=target))
    wanted.spec.down.stabilization.FromSeconds(0)
    return wanted


async def names(one: Autoscaler, count: int) -> list[str]:
    """Names of the replicas, once so many are ready."""

    async def check() -> list[str]:
        status = await one.status()
        found = [item.name for item in await one.replicas()]
        return found if status.ready_replicas == count == len(found) else []

    return await eventually(check)


async def test_what_a_replica_reported_is_gone_with_it(autoscaler: Autoscaler, adapter: FakeAdapter) -> None:
    await autoscaler.create(of_replicas())
    first, second = await names(autoscaler, 2)
    for replica in (first, second):
        await report(autoscaler, replica, 50.0)
    adapter.set(first, FAILED)
    await eventually(lambda: listed(autoscaler), lambda found: found == [(second, "busy", 50.0)])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await report(autoscaler, first, 50.0)
    assert reason(caught.value)[0] == "NOT_FOUND"
    await autoscaler.delete()
    await eventually(lambda: listed(autoscaler), lambda found: not found)


async def test_what_is_no_number_no_name_or_told_twice_is_refused(autoscaler: Autoscaler) -> None:
    await autoscaler.create(endpoint())
    nan, infinite = (api.MetricValue(metric="m", value=float(text)) for text in ("nan", "-inf"))
    one = api.MetricValue(metric="m", value=1.0)
    for name, values, status, told in (
        ("endpoints/e", [nan], "INVALID_ARGUMENT", "values[0].value"),
        ("endpoints/e", [infinite], "INVALID_ARGUMENT", "values[0].value"),
        ("endpoints/e", [one, one], "INVALID_ARGUMENT", "values[1].metric"),
        ("e", [one], "INVALID_ARGUMENT", "name"),
        ("endpoints/e/decisions/1", [one], "INVALID_ARGUMENT", "name"),
        ("endpoints/other", [one], "NOT_FOUND", "endpoints/other"),
        ("endpoints/e/replicas/gone", [one], "NOT_FOUND", "it has ended"),
    ):
        request = api.ReportMetricsRequest(name=name, values=values)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await autoscaler.metrics.ReportMetrics(request, timeout=TIMEOUT)
        assert reason(caught.value)[0] == status
        assert told in from_rpc_error(caught.value).message
    assert await listed(autoscaler) == []


async def test_metrics_are_listed_in_order_and_one_by_one_with_their_age(autoscaler: Autoscaler) -> None:
    await autoscaler.create(endpoint())
    await autoscaler.create(endpoint(name="f"))
    for name, metric in (("f", "a"), ("e", "b"), ("e", "a")):
        await report(autoscaler, f"endpoints/{name}", 1.0, metric=metric, age=30.0)
    found = [item[:2] for item in await listed(autoscaler)]
    assert found == [("endpoints/e", "a"), ("endpoints/e", "b"), ("endpoints/f", "a")]
    asked = api.GetMetricRequest(name="endpoints/e", metric="b")
    one = (await autoscaler.metrics.GetMetric(asked, timeout=TIMEOUT)).metric
    assert (one.value.metric, 30.0 <= seconds(one.value.age) < 30.0 + TIMEOUT) == ("b", True)
    assert await listed(autoscaler, "endpoints/f") == [("endpoints/f", "a", 1.0)]


async def test_an_agent_reports_only_for_replicas_that_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = write_tokens(tmp_path / "tokens.toml", n1="agent", n2="agent", ada="operator", eve="viewer")
    async with serving(FakeAllocator({})) as address, running(tmp_path, address) as open_one:
        adapter = FakeAdapter("n1", node="n1")
        async with adapter.connected(open_one.address):
            await open_one.create(endpoint(low=1))
            [replica] = await names(open_one, 1)
    monkeypatch.setattr(autoscaler_app, "Authenticator", lambda: Authenticator(tokens_file=tokens))
    async with serving(FakeAllocator({})) as address, running(tmp_path, address) as one:
        answers = {}
        for who in ("n1", "n2", "ada", "eve"):
            for name in ("endpoints/e", replica):
                try:
                    await report(one, name, 1.0, who=who)
                except grpc.aio.AioRpcError as error:
                    answers[who, name] = reason(error)[1]
    refused = {
        ("n1", "endpoints/e"): "NOT_YOUR_REPLICA",
        ("n2", "endpoints/e"): "NOT_YOUR_REPLICA",
        ("n2", replica): "NOT_YOUR_REPLICA",
        ("eve", "endpoints/e"): "ROLE_TOO_LOW",
        ("eve", replica): "ROLE_TOO_LOW",
    }
    assert answers == refused


async def test_idle_replicas_are_stopped_before_busy_ones(
    autoscaler: Autoscaler, adapter: FakeAdapter
) -> None:
    """The oldest is idle, and goes first; what was reported a minute ago says nothing, so its replica goes last."""
    wanted = endpoint(low=0, high=8)
    wanted.spec.busy_metric = "busy"
    await autoscaler.create(wanted)
    order: list[str] = []
    for count in range(1, 5):
        await autoscaler.set_replicas(count)
        await eventually(lambda count=count: len(adapter.alive) == count)
        order.extend(set(adapter.alive) - set(order))
    first, second, third, fourth = order
    for name, value, age in ((first, 0.0, 0.0), (second, 2.0, 0.0), (fourth, 1.0, 0.0), (third, 0.0, 60.0)):
        await report(autoscaler, name, value, age=age)
    for left in ({second, third, fourth}, {second, third}, {third}):
        await autoscaler.set_replicas(len(left))
        await eventually(lambda left=left: set(adapter.alive) == left)


async def test_signals_that_differ_while_decisions_repeat_are_all_shown(autoscaler: Autoscaler) -> None:
    """Decisions in a row that say the same are one, with the values of the last: nothing true can be drawn of that."""
    wanted = endpoint()
    wanted.spec.signals.add(id="load", pushed=api.PushedSignal(metric="load"), max_age=to_duration(60))
    target = api.TargetRule(value=50, type=api.TargetType.TARGET_TYPE_VALUE)
    wanted.spec.rules.append(api.Rule(id="t", signal="load", target=target))
    await autoscaler.create(wanted)
    request = api.QuerySignalsRequest(name=wanted.name)

    async def shown() -> list[float | None]:
        found = (await autoscaler.decisions.QuerySignals(request, timeout=TIMEOUT)).signals
        ok = api.Observation.STATUS_OK
        return [each.value if each.status == ok else None for one in found for each in one.samples]

    told: list[float | None] = [None]
    for value in (3.0, 9.0, 5.0, 5.0, 7.0):
        await report(autoscaler, wanted.name, value, metric="load")
        told = told if told[-1] == value else [*told, value]

        async def all_told(expected: tuple[float | None, ...] = tuple(told)) -> bool:
            return tuple((await shown())[-len(expected) :]) == expected

        await eventually(all_told)
    assert len([one for one in await autoscaler.history() if one.observations]) < len(told)
