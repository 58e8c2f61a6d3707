"""The autoscaler in this process, with queue readings that a test sets, and everything a test does with it."""

import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
from google.protobuf.field_mask_pb2 import FieldMask

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler import app
from gpuscale.autoscaler.domain.signals import QueueReading, QueueState, Watcher, WatchSpec
from gpuscale.autoscaler.settings import AutoscalerSettings
from gpuscale.autoscaler.signals.prometheus import PrometheusSettings
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.rpc.server import Server, ServerOptions
from gpuscale.common.rpc.status import from_rpc_error
from gpuscale.common.runtime.tasks import Clock, SystemClock
from gpuscale.common.security.auth import Authenticator
from gpuscale.common.wire import to_duration

TIMEOUT = 60.0
"""Seconds after which a call hangs: nothing here takes long, but on a machine that is loaded."""
GREATER, LESS_OR_EQUAL = api.Comparator.COMPARATOR_GREATER_THAN, api.Comparator.COMPARATOR_LESS_THAN_OR_EQUAL


class FakeWatchers:
    """In place of `QueueWatchers`: watchers `jobs` and `other`, with readings that are always fresh."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.queues: dict[str, tuple[int | None, int | None] | QueueState] = {"jobs": (0, 0), "other": (0, 0)}
        self.in_use: Callable[[str], list[str]] = lambda _: []

    def reading(self, watcher: str) -> QueueReading | None:
        """What the test set: counts, or a state in which nothing can be read."""
        found = self.queues.get(watcher)
        if found is None:
            return None
        if isinstance(found, QueueState):
            return QueueReading(found, observed_at=self._clock.now(), message="the broker is stopped")
        return QueueReading(QueueState.OK, found[0], found[1], 1, self._clock.now())

    def every(self) -> list[Watcher]:
        """A watcher for each that has readings."""
        date = self._clock.wall().replace(microsecond=0, second=0)
        return [Watcher(one, WatchSpec("default", "/", (one,)), "etag", date) for one in sorted(self.queues)]


class Autoscaler:
    """A running autoscaler, called over gRPC."""

    def __init__(self, address: str, channel: grpc.aio.Channel, watchers: FakeWatchers) -> None:
        self.address = address
        self.channel = channel
        self.watchers = watchers
        self.endpoints = api.EndpointServiceStub(channel)
        self.decisions = api.DecisionServiceStub(channel)
        self.adapters = api.AdapterServiceStub(channel)
        self.metrics = api.MetricServiceStub(channel)
        self.rules = api.RuleServiceStub(channel)
        self.presets = api.PresetServiceStub(channel)
        self.queue_watchers = api.QueueWatcherServiceStub(channel)

    async def create(self, endpoint: api.Endpoint, request_id: str = "", **fields: Any) -> api.Endpoint:
        request = api.CreateEndpointRequest(
            endpoint=endpoint, request_id=request_id or str(uuid.uuid4()), **fields
        )
        return (await self.endpoints.CreateEndpoint(request, timeout=TIMEOUT)).endpoint

    async def get(self, name: str = "endpoints/e") -> api.Endpoint:
        return (await self.endpoints.GetEndpoint(api.GetEndpointRequest(name=name), timeout=TIMEOUT)).endpoint

    async def update(self, endpoint: api.Endpoint, *paths: str, **fields: Any) -> api.Endpoint:
        mask = FieldMask(paths=paths) if paths else None
        request = api.UpdateEndpointRequest(endpoint=endpoint, update_mask=mask, **fields)
        return (await self.endpoints.UpdateEndpoint(request, timeout=TIMEOUT)).endpoint

    async def delete(self, name: str = "endpoints/e") -> None:
        await self.endpoints.DeleteEndpoint(api.DeleteEndpointRequest(name=name), timeout=TIMEOUT)

    async def set_replicas(self, replicas: int, current: int | None = None) -> api.Endpoint:
        request = api.SetReplicasRequest(name="endpoints/e", replicas=replicas, current_replicas=current)
        return (await self.endpoints.SetReplicas(request, timeout=TIMEOUT)).endpoint

    async def replicas(self, *, ended: bool = False, parent: str = "") -> list[api.Replica]:
        request = api.ListReplicasRequest(show_ended=ended, parent=parent, page_size=1000)
        return list((await self.endpoints.ListReplicas(request, timeout=TIMEOUT)).replicas)

    async def history(self, parent: str = "") -> list[api.Decision]:
        """Decisions, newest first."""
        request = api.ListDecisionsRequest(parent=parent, page_size=1000)
        return list((await self.decisions.ListDecisions(request, timeout=TIMEOUT)).decisions)

    async def latest(self) -> api.Decision:
        return (await self.history())[0]

    async def status(self) -> api.EndpointStatus:
        return (await self.get()).status

    async def wants(self, count: int, name: str = "endpoints/e") -> bool:
        """Whether so many replicas of an endpoint are wanted now."""
        return (await self.get(name)).status.desired_replicas == count

    async def gone(self) -> bool:
        return not (await self.endpoints.ListEndpoints(api.ListEndpointsRequest(), timeout=TIMEOUT)).endpoints

    async def connected(self, count: int) -> bool:
        found = await self.adapters.ListAdapters(api.ListAdaptersRequest(), timeout=TIMEOUT)
        return sum(one.state == api.Adapter.STATE_CONNECTED for one in found.adapters) == count


@asynccontextmanager
async def running(
    data_dir: Path,
    allocator_address: str,
    watchers: FakeWatchers | None = None,
    clock: Clock | None = None,
    *,
    fleet_address: str = "127.0.0.1:1",
    prometheus: Mapping[str, PrometheusSettings] | None = None,
) -> AsyncGenerator[Autoscaler]:
    """Run the autoscaler on a data directory, without a fleet unless it is told of one; leaving stops it."""
    clock = clock or SystemClock()
    fake = watchers or FakeWatchers(clock)

    @asynccontextmanager
    async def open_watchers(*given: Any) -> AsyncGenerator[FakeWatchers]:
        fake.in_use = given[-1]
        yield fake

    settings = AutoscalerSettings(data_dir=data_dir, prometheus=dict(prometheus or {}))
    with patch.object(app, "open_watchers", open_watchers):
        async with (
            open_channel(fleet_address) as fleet,
            open_channel(allocator_address) as allocator,
            app.open_autoscaler(settings, fleet=fleet, allocator=allocator, clock=clock) as registrations,
        ):
            server = Server(ServerOptions(), Authenticator())
            server.add(*registrations)
            address = server.bind()
            async with server, open_channel(address) as channel:
                yield Autoscaler(address, channel, fake)


def step(
    rule: str, comparator: api.Comparator.ValueType, threshold: float, change: int, **fields: Any
) -> api.Rule:
    """A step rule on the signal `depth` with a cooldown of 0.1 s."""
    fields.setdefault("cooldown", to_duration(0.1))
    of = api.StepRule(comparator=comparator, threshold=threshold, step=change)
    return api.Rule(id=rule, signal="depth", step=of, **fields)


def endpoint(*rules: api.Rule, low: int = 0, high: int = 4, name: str = "e", **template: Any) -> api.Endpoint:
    """Endpoint `e` that reads the watcher `jobs` as signal `depth`, where it has rules; its `tick` is 0.1 s."""
    queue = api.QueueSignal(watcher="watchers/jobs", count=api.QueueCount.QUEUE_COUNT_TOTAL)
    signal = api.Signal(id="depth", queue=queue, max_age=to_duration(5))
    template.setdefault("lease_ttl", to_duration(5))
    spec = api.EndpointSpec(
        min_replicas=low,
        max_replicas=high,
        tick=to_duration(template.pop("tick", 0.1)),
        signals=[signal] if rules else [],
        rules=rules,
        template=api.ReplicaTemplate(template="worker", gpu_count=template.pop("gpus", 0), **template),
    )
    return api.Endpoint(name=f"endpoints/{name}", spec=spec)


def scaling(high: int = 4, gpus: int = 0, **fields: Any) -> api.Endpoint:
    """An endpoint that grows by one while more than 10 messages are there, and shrinks by one when there are none."""
    return endpoint(
        step("up", GREATER, 10, 1), step("down", LESS_OR_EQUAL, 0, -1), high=high, gpus=gpus, **fields
    )


def reason(error: grpc.aio.AioRpcError) -> tuple[str, str]:
    """Status and reason of a failed call."""
    return error.code().name, from_rpc_error(error).reason
