"""Endpoints over gRPC: creating, changing, scaling, listing, following each other and deleting, and every way of doing it wrong."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable
from pathlib import Path
from typing import Any

import grpc
import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.common.rpc.status import PROBLEM_KEY, from_rpc_error
from gpuscale.common.runtime import tasks
from gpuscale.common.store.store import Store
from gpuscale.common.wire import to_duration
from tests.support.autoscaler_app import (
    GREATER,
    LESS_OR_EQUAL,
    TIMEOUT,
    Autoscaler,
    endpoint,
    reason,
    running,
    scaling,
    step,
)
from tests.support.fake_adapter import FakeAdapter
from tests.support.waiting import eventually


async def refused(call: Awaitable[Any]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def fields(error: grpc.aio.AioRpcError) -> list[str]:
    found = from_rpc_error(error)
    return [violation.field for violation in getattr(found, "violations", ())]


async def test_what_was_created_is_what_is_returned(autoscaler: Autoscaler) -> None:
    wanted = scaling(high=3, gpus=2, parameters={"queue": "jobs"}, min_memory_bytes=0)
    made = await autoscaler.create(wanted)
    assert made.spec == wanted.spec
    assert made.etag
    assert made.create_time == made.update_time
    again = await autoscaler.get()
    assert (again.spec, again.etag) == (wanted.spec, made.etag)
    bare = api.EndpointSpec(template=api.ReplicaTemplate(template="worker"))
    spec = (await autoscaler.create(api.Endpoint(name="endpoints/bare", spec=bare))).spec
    assert spec == bare, "what is not stated stays so"
    assert not spec.HasField("tick")


async def test_a_list_tells_that_nothing_can_be_written(
    autoscaler: Autoscaler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store, "problem", problems := dict[str, str]())

    async def told() -> bool:
        problems["autoscaler"] = "the disk is full"  # a commit in between takes it away
        call = autoscaler.endpoints.ListEndpoints(api.ListEndpointsRequest(), timeout=TIMEOUT)
        await call
        found = dict(await call.trailing_metadata()).get(PROBLEM_KEY)
        return found == "the autoscaler cannot write its state: the disk is full"

    await eventually(told)


async def test_a_repeated_request_returns_what_it_made_whatever_became_of_it(autoscaler: Autoscaler) -> None:
    request_id = str(uuid.uuid4())
    made = await autoscaler.create(endpoint(), request_id)
    await autoscaler.update(endpoint(high=9))
    again = await autoscaler.create(endpoint(), request_id)
    assert (again.etag, again.spec) == (made.etag, made.spec)
    assert (await autoscaler.get()).spec.max_replicas == 9


async def test_a_spec_that_cannot_work_is_refused_and_the_field_named(autoscaler: Autoscaler) -> None:
    sourceless = scaling(name="other")
    sourceless.spec.signals[0].ClearField("queue")
    await autoscaler.create(endpoint())
    for wanted, field in (
        (endpoint(low=3, high=2), "max_replicas"),
        (endpoint(step("a", GREATER, 5, 1), step("b", LESS_OR_EQUAL, 8, -1)), "rules[1].step.threshold"),
        (sourceless, "signals[0].queue"),
    ):
        wanted.name = "endpoints/e"
        assert fields(await refused(autoscaler.update(wanted))) == [f"endpoint.spec.{field}"]
        wanted.name = "endpoints/other"
        error = await refused(autoscaler.create(wanted))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert fields(error) == [f"endpoint.spec.{field}"]


async def test_a_watcher_that_does_not_exist_or_is_about_to_be_read(
    autoscaler: Autoscaler, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = scaling()
    wanted.spec.signals[0].queue.watcher = "watchers/gone"
    error = await refused(autoscaler.create(wanted))
    assert reason(error) == ("FAILED_PRECONDITION", "UNKNOWN_WATCHER")
    await autoscaler.create(scaling())
    assert reason(await refused(autoscaler.update(wanted))) == ("FAILED_PRECONDITION", "UNKNOWN_WATCHER")
    assert autoscaler.watchers.in_use("gone") == []
    await autoscaler.create(scaling(name="f"))
    assert autoscaler.watchers.in_use("jobs") == ["endpoints/e", "endpoints/f"]
    await autoscaler.update(endpoint())
    assert autoscaler.watchers.in_use("jobs") == ["endpoints/f"]
    late = "autoscaler.store.before_commit=sleep:0.5"  # some ticks
    monkeypatch.setattr(tasks, "_points", tasks.parse_failpoints(late))
    wanted.name, wanted.spec.signals[0].queue.watcher = "endpoints/f", "watchers/other"
    update = asyncio.create_task(autoscaler.update(wanted))
    await eventually(lambda: autoscaler.watchers.in_use("other"))
    while not update.done():
        assert autoscaler.watchers.in_use("other") == ["endpoints/f"]
        await asyncio.sleep(0.01)


async def test_an_update_takes_what_the_mask_names_and_changes_nothing_twice(autoscaler: Autoscaler) -> None:
    made = await autoscaler.create(scaling())
    changed = scaling(high=9)
    changed.spec.tick.CopyFrom(to_duration(7))
    after = await autoscaler.update(changed, "spec.max_replicas")
    assert after.etag != made.etag
    assert (after.spec.max_replicas, after.spec.tick) == (9, made.spec.tick)
    whole = await autoscaler.update(endpoint(high=7))
    assert whole.spec == endpoint(high=7).spec, "without a mask all of it is replaced"
    same = await autoscaler.update(endpoint(high=7), "spec")
    assert (same.etag, same.update_time) == (whole.etag, whole.update_time)


async def test_orders_out_of_range_and_from_another_count(autoscaler: Autoscaler) -> None:
    await autoscaler.create(endpoint(low=1, high=4, tick=600))
    for replicas in (0, 5):
        assert (await refused(autoscaler.set_replicas(replicas))).code() is grpc.StatusCode.OUT_OF_RANGE
    error = await refused(autoscaler.set_replicas(2, current=3))
    assert reason(error) == ("FAILED_PRECONDITION", "OTHER_CURRENT_REPLICAS")
    await autoscaler.set_replicas(4, current=1)
    assert (await autoscaler.update(endpoint(high=5))).status.desired_replicas == 4, "an update keeps it"


async def test_an_endpoint_that_is_being_deleted_takes_no_change_and_says_since_when(
    autoscaler: Autoscaler, adapter: FakeAdapter
) -> None:
    adapter.finishes = False
    made = await autoscaler.create(endpoint(low=1, high=1))
    assert (made.state, made.HasField("delete_time")) == (api.Endpoint.STATE_ACTIVE, False)
    await eventually(lambda: adapter.alive)
    request = api.DeleteEndpointRequest(name=made.name)
    first, second = [
        (await autoscaler.endpoints.DeleteEndpoint(request, timeout=TIMEOUT)).endpoint for _ in range(2)
    ]
    assert (first.state, first.delete_time) == (api.Endpoint.STATE_DELETING, second.delete_time)
    assert first.HasField("delete_time")
    for call in (autoscaler.update(endpoint()), autoscaler.set_replicas(1)):
        assert reason(await refused(call)) == ("FAILED_PRECONDITION", "BEING_DELETED")
    assert (await refused(autoscaler.create(endpoint()))).code() is grpc.StatusCode.ALREADY_EXISTS

    async def stopping() -> bool:
        deleted = api.Replica.END_REASON_ENDPOINT_DELETED
        return any(one.end_reason == deleted for one in await autoscaler.replicas())

    await eventually(stopping)


async def test_decisions_are_filtered_and_sorted(autoscaler: Autoscaler) -> None:
    await autoscaler.create(scaling())
    await eventually(autoscaler.history)
    decided = autoscaler.decisions.ListDecisions
    assert not (await decided(api.ListDecisionsRequest(filter="before > 0"), timeout=TIMEOUT)).decisions
    ordered = api.ListDecisionsRequest(parent="endpoints/e", order_by="create_time")
    times = [one.create_time.ToNanoseconds() for one in (await decided(ordered, timeout=TIMEOUT)).decisions]
    assert times
    assert times == sorted(times)


@pytest.fixture
async def autoscaler(tmp_path: Path) -> AsyncGenerator[Autoscaler]:
    async with running(tmp_path, "127.0.0.1:1") as one:
        yield one


def following(name: str, leader: str) -> api.Endpoint:
    """One replica for each two of the leader."""
    made = endpoint(name=name, high=9)
    made.spec.signals.add(id="leader", endpoint=api.EndpointSignal(endpoint=f"endpoints/{leader}"))
    made.spec.rules.add(id="ratio", signal="leader", target=api.TargetRule(value=2.0))
    made.spec.down.stabilization.CopyFrom(to_duration(0))
    return made


async def test_it_follows_what_the_other_aims_at_both_ways_and_holds_while_there_is_none(
    autoscaler: Autoscaler,
) -> None:
    await autoscaler.create(following("decode", "e"))
    await autoscaler.create(endpoint(high=9))
    for leader, follower in ((5, 3), (8, 4), (3, 2)):
        await autoscaler.set_replicas(leader)
        await eventually(lambda follower=follower: autoscaler.wants(follower, "endpoints/decode"))
    await autoscaler.delete()

    async def missed() -> bool:
        request = api.ListDecisionsRequest(parent="endpoints/decode", page_size=1)
        [newest] = (await autoscaler.decisions.ListDecisions(request, timeout=TIMEOUT)).decisions
        [seen] = newest.observations
        return seen.status == api.Observation.STATUS_MISSING and seen.detail == "there is no endpoints/e"

    await eventually(missed)
    assert await autoscaler.wants(2, "endpoints/decode")


async def test_circles_are_refused_with_the_field_that_closes_them(autoscaler: Autoscaler) -> None:
    await autoscaler.create(following("b", "a"))
    await autoscaler.create(following("c", "b"))
    closing = following("a", "other")
    closing.spec.signals.add(id="back", endpoint=api.EndpointSignal(endpoint="endpoints/c"))
    refusals = {"a": closing, "d": following("d", "d")}
    texts: dict[str, str] = {}
    for name, one in refusals.items():
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await autoscaler.create(one)
        assert reason(caught.value)[0] == "INVALID_ARGUMENT"
        texts[name] = caught.value.details() or ""
    assert texts == {
        "a": "endpoint.spec.signals[1].endpoint.endpoint must not lead back to endpoints/a, as endpoints/c does",
        "d": "endpoint.spec.signals[0].endpoint.endpoint must not lead back to endpoints/d, as endpoints/d does",
    }
    del closing.spec.signals[1]
    await autoscaler.create(closing)
    changed = following("a", "b")
    with pytest.raises(grpc.aio.AioRpcError, match="must not lead back"):
        await autoscaler.update(changed)
