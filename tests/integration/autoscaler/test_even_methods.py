"""Resources are found one by one, lists are filtered and sorted, and what is deleted twice is no error where that is allowed."""

import grpc
import pytest

from gpuscale.api.autoscaler import v1 as api
from tests.support.autoscaler_app import TIMEOUT, Autoscaler, endpoint, reason, scaling
from tests.support.waiting import eventually


async def test_lists_are_filtered_and_sorted(autoscaler: Autoscaler) -> None:
    for name, high in (("a", 3), ("b", 9), ("c", 5)):
        await autoscaler.create(scaling(high=high, name=name))
    lists = autoscaler.endpoints.ListEndpoints
    request = api.ListEndpointsRequest(
        filter="spec.max_replicas > 3", order_by="spec.max_replicas desc", page_size=1
    )
    first = await lists(request, timeout=TIMEOUT)
    request.page_token = first.next_page_token
    second = await lists(request, timeout=TIMEOUT)
    assert [one.name for one in (*first.endpoints, *second.endpoints)] == ["endpoints/b", "endpoints/c"]
    assert not second.next_page_token
    await eventually(lambda: autoscaler.history("endpoints/c"))
    decided = autoscaler.decisions.ListDecisions
    assert not (await decided(api.ListDecisionsRequest(filter="before > 0"), timeout=TIMEOUT)).decisions
    ordered = api.ListDecisionsRequest(parent="endpoints/c", order_by="create_time")
    times = [one.create_time.ToNanoseconds() for one in (await decided(ordered, timeout=TIMEOUT)).decisions]
    assert times
    assert times == sorted(times)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await lists(api.ListEndpointsRequest(filter="nonsense = 1"), timeout=TIMEOUT)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_presets_and_metrics_are_found_one_by_one(autoscaler: Autoscaler) -> None:
    page = await autoscaler.presets.ListPresets(api.ListPresetsRequest(page_size=2), timeout=TIMEOUT)
    assert len(page.presets) == 2
    assert page.next_page_token
    name = page.presets[0].name
    one = await autoscaler.presets.GetPreset(api.GetPresetRequest(name=name), timeout=TIMEOUT)
    assert one.preset == page.presets[0]
    await autoscaler.create(endpoint())
    value = api.MetricValue(metric="tasks", value=3)
    report = api.ReportMetricsRequest(name="endpoints/e", values=[value])
    await autoscaler.metrics.ReportMetrics(report, timeout=TIMEOUT)
    asked = api.GetMetricRequest(name="endpoints/e", metric="tasks")
    assert (await autoscaler.metrics.GetMetric(asked, timeout=TIMEOUT)).metric.value.value == 3
    asked.metric = "others"
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await autoscaler.metrics.GetMetric(asked, timeout=TIMEOUT)
    assert reason(refused.value)[0] == "NOT_FOUND"


async def test_what_is_not_there_is_deleted_where_that_is_allowed(autoscaler: Autoscaler) -> None:
    await autoscaler.create(endpoint())
    for method, request in (
        (autoscaler.endpoints.DeleteEndpoint, api.DeleteEndpointRequest(name="endpoints/x")),
        (autoscaler.rules.DeleteRule, api.DeleteRuleRequest(name="endpoints/e/rules/x")),
        (autoscaler.adapters.ForgetAdapter, api.ForgetAdapterRequest(name="adapters/x")),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await method(request, timeout=TIMEOUT)
        assert reason(refused.value)[0] == "NOT_FOUND"
        request.allow_missing = True
        await method(request, timeout=TIMEOUT)
