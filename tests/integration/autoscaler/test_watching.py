"""Every Watch tells what changes, also to who was away."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from gpuscale.api.autoscaler import v1 as api
from tests.support.autoscaler_app import TIMEOUT, Autoscaler, endpoint, reason, scaling
from tests.support.fake_adapter import FakeAdapter
from tests.support.waiting import eventually

DELETING, STOPPED = api.Endpoint.STATE_DELETING, api.Replica.STATE_STOPPED


class Watch:
    """One Watch as a reader: what it was told of each name, and the token to go on from."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.told: list[Any] = []
        self.removed: list[str] = []
        self.token = ""
        self.reset = False

    async def until(self, is_there: Callable[["Watch"], bool]) -> None:
        async with asyncio.timeout(TIMEOUT):
            while not is_there(self):
                message = await self._call.read()
                assert message is not grpc.aio.EOF
                [[_, resources]] = [one for one in message.ListFields() if one[0].number == 1] or [[0, []]]
                self.told += resources
                self.removed += message.removed
                self.token = message.resume_token or self.token
                self.reset = self.reset or message.reset

    def tells(self, **fields: Any) -> bool:
        """Whether it was told of a resource with these values."""
        return any(all(getattr(one, key) == value for key, value in fields.items()) for one in self.told)


@asynccontextmanager
async def watching(method: Any, request: Any) -> AsyncGenerator[Watch]:
    call = method(request)
    try:
        yield Watch(call)
    finally:
        call.cancel()


async def test_endpoints_are_told_until_they_are_gone(autoscaler: Autoscaler) -> None:
    await autoscaler.create(endpoint(name="before"))
    async with watching(autoscaler.endpoints.WatchEndpoints, api.WatchEndpointsRequest()) as watch:
        await watch.until(lambda one: one.tells(name="endpoints/before", state=api.Endpoint.STATE_ACTIVE))
        adapter = FakeAdapter("a")
        async with adapter.connected(autoscaler.address):
            await autoscaler.create(endpoint(low=1))
            await watch.until(lambda one: any(each.status.ready_replicas == 1 for each in one.told))
            adapter.finishes = False
            await autoscaler.delete()
            await watch.until(lambda one: one.tells(name="endpoints/e", state=DELETING))
            assert all(one.HasField("delete_time") for one in watch.told if one.state == DELETING)
            adapter.finish()
            await watch.until(lambda one: one.removed == ["endpoints/e"])


async def test_who_was_away_is_told_what_ended_meanwhile_and_why_and_finds_it(autoscaler: Autoscaler) -> None:
    watch_replicas, adapter = autoscaler.endpoints.WatchReplicas, FakeAdapter("a", node="n")
    other = endpoint(low=1, name="other")
    async with adapter.connected(autoscaler.address):
        await autoscaler.create(endpoint(low=1))
        await autoscaler.create(other)
        request = api.WatchReplicasRequest(parent="endpoints/e")
        async with watching(watch_replicas, request) as watch:
            await watch.until(lambda one: one.tells(state=api.Replica.STATE_READY, node="nodes/n"))
        assert all(one.name.startswith("endpoints/e/") for one in watch.told)
        shrunk = await autoscaler.get()
        shrunk.spec.min_replicas = 0
        await autoscaler.update(shrunk)
        await autoscaler.set_replicas(0)
        await eventually(lambda: len(adapter.alive) == 1)
        request.resume_token = watch.token
        async with watching(watch_replicas, request) as watch:
            await watch.until(
                lambda one: one.tells(state=STOPPED, end_reason=api.Replica.END_REASON_SCALED_IN)
            )
            assert not watch.reset
    get, [gone] = autoscaler.endpoints.GetReplica, [one for one in watch.told if one.state == STOPPED]
    found = (await get(api.GetReplicaRequest(name=gone.name), timeout=TIMEOUT)).replica
    assert (found.node, found.end_reason) == ("nodes/n", api.Replica.END_REASON_SCALED_IN)
    others = api.GetReplicaRequest(name=gone.name.replace("endpoints/e/", "endpoints/other/"))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await get(others, timeout=TIMEOUT)
    assert reason(refused.value)[0] == "NOT_FOUND"


async def test_each_decision_is_told_and_the_one_before_it_with_its_last_count(
    autoscaler: Autoscaler,
) -> None:
    await autoscaler.create(scaling())
    await eventually(autoscaler.history)
    request = api.WatchDecisionsRequest(filter="wanted >= 0")
    async with watching(autoscaler.decisions.WatchDecisions, request) as watch:
        await watch.until(lambda one: bool(one.told))
        [first] = watch.told
        await autoscaler.set_replicas(2)
        await watch.until(lambda one: one.tells(wanted=2))
        await watch.until(lambda one: [each.name for each in one.told].count(first.name) == 2)
        settled = [one for one in watch.told if one.name == first.name][-1]
        stored = api.GetDecisionRequest(name=first.name)
        assert settled == (await autoscaler.decisions.GetDecision(stored, timeout=TIMEOUT)).decision


async def test_adapters_and_readings_of_queues_are_told(autoscaler: Autoscaler) -> None:
    adapters, queues = autoscaler.adapters.WatchAdapters, autoscaler.queue_watchers.WatchQueueWatchers
    async with (
        watching(adapters, api.WatchAdaptersRequest()) as watch,
        watching(queues, api.WatchQueueWatchersRequest(filter="status.ready_count > 5")) as full,
    ):
        async with FakeAdapter("a", node="n").connected(autoscaler.address):
            await watch.until(lambda one: one.tells(node="nodes/n", state=api.Adapter.STATE_CONNECTED))
            request = api.GetAdapterRequest(name="adapters/a")
            found = (await autoscaler.adapters.GetAdapter(request, timeout=TIMEOUT)).adapter
            assert (found.name, found.node) == ("adapters/a", "nodes/n")
        await watch.until(lambda one: one.tells(state=api.Adapter.STATE_DISCONNECTED))
        autoscaler.watchers.queues["jobs"] = (7, 0)
        await full.until(lambda one: one.tells(name="watchers/jobs"))
        autoscaler.watchers.queues["jobs"] = (0, 0)
        await full.until(lambda one: one.removed == ["watchers/jobs"])
        assert not full.tells(name="watchers/other")
