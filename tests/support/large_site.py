"""A gateway with a thousand GPUs, whose readings are others every second: what a page costs when there is much to show.

    python -m tests.support.large_site     serves until it is ended, and says where

Plain gRPC with threads; what is not asked by a dashboard is not there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from functools import cache

import grpc
from google.protobuf.timestamp_pb2 import Timestamp

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.common.names import gpu_name, node_name
from gpuscale.common.wire import to_duration
from tests.support.plain_service import Faults, Handlers

GIB = 1 << 30
PERIOD = 1.0
MOMENTS = 6
"""Readings of each GPU before they come again."""
NOW = int(time.time())
SCALES = {
    monitor_api.Metric.METRIC_MEMORY_USED_PERCENT: (2.0, 0.9),
    monitor_api.Metric.METRIC_TEMPERATURE_CELSIUS: (35.0, 0.4),
    monitor_api.Metric.METRIC_POWER_WATTS: (70.0, 6.0),
}
"""Reading of an idle GPU, and how much it grows with each percent of utilization."""
MODEL = "NVIDIA H100 80GB HBM3"


def uuid_of(node: int, index: int) -> str:
    return f"GPU-{node:08x}-0000-4000-8000-{index:012x}"


def load(place: int, at: float) -> float:
    """Utilization of a GPU or a node: jobs that come and go, and some that never run."""
    if place % 7 == 3:
        return 4.0
    wave = math.sin(at / (260 + 40 * (place % 5)) + place * 1.7) + 0.35 * math.sin(at / 71 + place)
    return 88.0 + 3 * math.sin(at / 9 + place) if wave > -0.25 else 6.0 + 3 * math.sin(at / 13)


def gpu_message(node: int, index: int, tick: int) -> types_api.Gpu:
    """A GPU that is another one's load each second."""
    used = 0.0 if (node + index) % 5 == 0 else load(node * 8 + index, NOW + tick * 9)
    uuid, name = uuid_of(node, index), f"node-{node:03}"
    return types_api.Gpu(
        name=gpu_name(name, uuid),
        uuid=uuid,
        index=index,
        model=MODEL,
        simulated=True,
        state=types_api.GpuState.GPU_STATE_OK,
        reading=types_api.GpuReading(
            utilization_percent=used,
            memory_total_bytes=80 * GIB,
            memory_used_bytes=int(used * GIB * 0.7),
            memory_free_bytes=80 * GIB - int(used * GIB * 0.7),
            temperature_celsius=35 + used * 0.4,
            power_watts=70 + used * 6,
            power_limit_watts=700,
            age=to_duration(0.1),
        ),
    )


@cache
def node_message(number: int, gpus: int, tick: int) -> monitor_api.Node:
    """A node at a moment."""
    name = f"node-{number:03}"
    found = [gpu_message(number, index, tick) for index in range(gpus)]
    snapshot = types_api.Snapshot(node=name, seq=tick, age=to_duration(0.1), simulated=True, gpus=found)
    online = monitor_api.NodeState.NODE_STATE_ONLINE
    return monitor_api.Node(name=node_name(name), state=online, snapshot=snapshot)


@cache
def reservations(nodes: int, gpus: int) -> list[allocator_api.Reservation]:
    """Of four GPUs each, on four in five of the nodes."""
    return [
        allocator_api.Reservation(
            name=f"reservations/r{number:04}-{half}",
            holder=f"training-{number % 40}",
            state=allocator_api.Reservation.STATE_ACTIVE,
            fence=number + 1,
            remaining=to_duration(60),
            gpus=[
                allocator_api.ReservedGpu(node=f"node-{number:03}", uuid=uuid_of(number, index), index=index)
                for index in range(half * 4, half * 4 + 4)
            ],
        )
        for number in range(nodes * 4 // 5)
        for half in range(gpus // 4)
    ]


class LargeSite:
    """Every service that the dashboard asks, of `nodes` nodes with `gpus` GPUs each; four in five are reserved."""

    def __init__(self, nodes: int = 125, gpus: int = 8) -> None:
        self.nodes, self.gpus, self.tick = nodes, gpus, 0
        self.released = False

    def node(self, number: int) -> monitor_api.Node:
        """A node as it is now. Its messages come again and again: making them costs more than all else here."""
        return node_message(number, self.gpus, self.tick % MOMENTS)

    def reservations(self) -> list[allocator_api.Reservation]:
        """All there are."""
        return [] if self.released else reservations(self.nodes, self.gpus)


class Fleet:
    """Nodes that all change each second."""

    service = "gpuscale.api.monitor.v1.FleetService"

    def __init__(self, site: LargeSite) -> None:
        self._site = site

    def WatchNodes(
        self, request: monitor_api.WatchNodesRequest, context: grpc.ServicerContext
    ) -> Iterator[monitor_api.WatchNodesResponse]:
        interval = max(0.1, request.min_interval.ToMilliseconds() / 1000)
        turns = max(1, round(PERIOD / interval))
        nodes = [self._site.node(number) for number in range(self._site.nodes)]
        yield monitor_api.WatchNodesResponse(nodes=nodes, full=True)
        turn = 0
        while context.is_active():
            time.sleep(interval)
            turn += 1
            self._site.tick = turn // turns
            changed = range(turn % turns, self._site.nodes, turns)
            yield monitor_api.WatchNodesResponse(nodes=[self._site.node(number) for number in changed])


class Health:
    """A few events that last."""

    service = "gpuscale.api.monitor.v1.HealthService"

    def WatchHealth(
        self, request: monitor_api.WatchHealthRequest, context: grpc.ServicerContext
    ) -> Iterator[monitor_api.WatchHealthResponse]:
        events = [
            monitor_api.HealthEvent(
                name=f"healthEvents/e{number}",
                check=monitor_api.HealthCheck.HEALTH_CHECK_THERMAL_SLOWDOWN,
                severity=monitor_api.HealthSeverity.HEALTH_SEVERITY_WARNING,
                start_time=Timestamp(seconds=NOW - 97 * number),
                node=f"node-{number:03}",
                uuid=uuid_of(number, 0),
                recommended_action=monitor_api.RecommendedAction.RECOMMENDED_ACTION_CHECK_HARDWARE,
                message="It slows down because it is too hot.",
                count=1,
            )
            for number in range(40)
        ]
        yield monitor_api.WatchHealthResponse(health_events=events, full=True)
        while context.is_active():
            time.sleep(PERIOD)


class History:
    """Ten minutes of every series that is asked for."""

    service = "gpuscale.api.monitor.v1.HistoryService"

    def QueryHistory(
        self, request: monitor_api.QueryHistoryRequest, context: grpc.ServicerContext
    ) -> monitor_api.QueryHistoryResponse:
        step = max(1.0, request.step.seconds + request.step.nanos / 1e9)
        begun = request.span.start_time.seconds
        last = time.time() - begun if begun else request.span.last.seconds or 600
        count, start = int(last / step), time.time() - last
        series = [
            monitor_api.HistorySeries(name=name, uuid=name, metric=metric)
            for name in (*request.names, *request.uuids)
            for metric in request.metrics
        ]
        for one in series:
            place = int(one.name.removeprefix("GPU-").removeprefix("nodes/node-")[:8], 16) * 8 + ord(
                one.name[-1]
            )
            # Some begin late: what was not read is to be seen as a gap.
            late = place % 11 == 10
            idle, per_percent = SCALES.get(one.metric, (0.0, 1.0))
            for number in range(count // 3 if late else 0, count):
                mean = idle + per_percent * load(place, start + number * step)
                spread = 3 * per_percent
                point = one.points.add(min=mean - spread, max=mean + spread, mean=mean, sample_count=2)
                point.start_time.FromNanoseconds(int((start + number * step) * 1e9))
        answer = monitor_api.QueryHistoryResponse(series=series, step=to_duration(step))
        answer.start_time.FromNanoseconds(int(start * 1e9))
        answer.end_time.FromNanoseconds(int((start + last) * 1e9))
        return answer


class Recordings:
    """One that runs, of the GPUs of a node."""

    service = "gpuscale.api.monitor.v1.RecordingService"

    def ListRecordings(
        self, request: monitor_api.ListRecordingsRequest, context: grpc.ServicerContext
    ) -> monitor_api.ListRecordingsResponse:
        metric = monitor_api.Metric
        stats = [
            monitor_api.MetricStats(metric=one, min=low, max=high, mean=(low + high) / 2, sample_count=600)
            for one, low, high in (
                (metric.METRIC_UTILIZATION_PERCENT, 5.0, 95.0),
                (metric.METRIC_MEMORY_USED_PERCENT, 4.0, 82.0),
                (metric.METRIC_TEMPERATURE_CELSIUS, 36.0, 74.0),
                (metric.METRIC_POWER_WATTS, 90.0, 640.0),
            )
        ]
        gpus = [
            monitor_api.RecordedGpu(
                name=gpu_name("node-003", uuid_of(3, index)),
                uuid=uuid_of(3, index),
                index=index,
                model=MODEL,
                sample_count=600,
                stats=stats,
            )
            for index in range(8)
        ]
        one = monitor_api.Recording(
            name="recordings/night",
            state=monitor_api.Recording.STATE_RUNNING,
            interval=to_duration(1),
            duration=to_duration(600),
            sample_count=600,
            gpus=gpus,
        )
        one.start_time.seconds = NOW - 600
        return monitor_api.ListRecordingsResponse(recordings=[one])


class Allocator:
    """Reservations, all on one page."""

    service = "gpuscale.api.allocator.v1.AllocatorService"

    def __init__(self, site: LargeSite) -> None:
        self._site = site

    def ListReservations(
        self, request: allocator_api.ListReservationsRequest, context: grpc.ServicerContext
    ) -> allocator_api.ListReservationsResponse:
        return allocator_api.ListReservationsResponse(reservations=self._site.reservations())


class Nodes:
    """Of which none is cordoned."""

    service = "gpuscale.api.allocator.v1.NodeService"

    def ListCordons(
        self, request: allocator_api.ListCordonsRequest, context: grpc.ServicerContext
    ) -> allocator_api.ListCordonsResponse:
        return allocator_api.ListCordonsResponse()


class Endpoints:
    """Twenty endpoints with ten replicas each."""

    service = "gpuscale.api.autoscaler.v1.EndpointService"

    def ListEndpoints(
        self, request: autoscaler_api.ListEndpointsRequest, context: grpc.ServicerContext
    ) -> autoscaler_api.ListEndpointsResponse:
        found = autoscaler_api.ListEndpointsResponse()
        for number in range(20):
            wanted = 2 + number * 7 % 11
            one = found.endpoints.add(name=f"endpoints/chat-{number}")
            one.spec.min_replicas, one.spec.max_replicas = 2, 12
            one.status.desired_replicas = one.status.granted_replicas = wanted
            one.status.starting_replicas = int(number % 3 == 0)
            one.status.ready_replicas = wanted - one.status.starting_replicas
            depth = 20 * wanted - 6
            one.status.summary = (
                f"stays at {wanted}: rule queue: {depth} waiting are {depth / 20:.1f} times 20"
            )
        return found

    def ListReplicas(
        self, request: autoscaler_api.ListReplicasRequest, context: grpc.ServicerContext
    ) -> autoscaler_api.ListReplicasResponse:
        return replicas()


@cache
def replicas() -> autoscaler_api.ListReplicasResponse:
    """Ten of each endpoint."""
    state = autoscaler_api.Replica
    found = autoscaler_api.ListReplicasResponse()
    for number in range(20):
        for replica in range(10):
            one = found.replicas.add(name=f"endpoints/chat-{number}/replicas/p{replica}")
            one.state = state.STATE_READY if replica < 9 else state.STATE_STARTING
            one.node, one.create_time.seconds = f"node-{number:03}", NOW - 60 * (10 - replica)
            one.gpu_uuids.append(uuid_of(number, replica % 8))
    return found


class Decisions:
    """Those of whichever endpoint: a queue that grows and is worked off, 20 messages a replica."""

    service = "gpuscale.api.autoscaler.v1.DecisionService"

    def ListDecisions(
        self, request: autoscaler_api.ListDecisionsRequest, context: grpc.ServicerContext
    ) -> autoscaler_api.ListDecisionsResponse:
        found = autoscaler_api.ListDecisionsResponse()
        before = 2
        for number in range(120):
            depth = waiting(number)
            asked = min(12, max(2, math.ceil(depth / 20)))
            wanted = asked if asked > before or number % 8 == 0 else before
            one = found.decisions.add(
                name=f"{request.parent}/decisions/d{number:04}", before=before, wanted=wanted, count=1
            )
            one.granted = min(wanted, 11)
            one.limited_by = "NO_CAPACITY" if wanted > one.granted else ""
            change = f"from {before} to {wanted}" if wanted != before else f"stays at {wanted}"
            one.summary = f"{change}: rule queue: {depth} waiting are {depth / 20:.1f} times 20"
            one.create_time.seconds = one.last_time.seconds = NOW - (119 - number) * 15
            one.observations.add(signal="depth", value=depth)
            before = wanted
        found.decisions.sort(key=lambda one: -one.create_time.seconds)
        return found

    def QuerySignals(
        self, request: autoscaler_api.QuerySignalsRequest, context: grpc.ServicerContext
    ) -> autoscaler_api.QuerySignalsResponse:
        found = autoscaler_api.QuerySignalsResponse()
        depth = found.signals.add(signal="depth")
        for number in range(120):
            one = depth.samples.add(value=waiting(number), status=autoscaler_api.Observation.STATUS_OK)
            one.start_time.seconds = one.end_time.seconds = NOW - (119 - number) * 15
        return found


def waiting(number: int) -> int:
    """Messages in the queue at a decision."""
    return max(0, round(95 + 100 * math.sin(number / 14 - 1) + 9 * math.sin(number)))


@contextmanager
def large_site(site: LargeSite) -> Iterator[str]:
    """Serve it; yields the address."""
    servicers = (
        *(Fleet(site), Health(), History(), Recordings(), Allocator(site)),
        *(Nodes(), Endpoints(), Decisions()),
    )
    with futures.ThreadPoolExecutor(16) as pool:
        server = grpc.server(pool, handlers=[Handlers(Faults(), *servicers)])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


if __name__ == "__main__":
    with large_site(LargeSite()) as address:
        print(address, flush=True)
        while True:
            time.sleep(3600)
