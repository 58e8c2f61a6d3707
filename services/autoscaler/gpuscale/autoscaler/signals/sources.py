"""Where signals get their values from: what the autoscaler's watchers and followers last read, never a call of its own."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gpuscale.autoscaler.domain.model import (
    ASKS_FOR_ROOM,
    DEFAULT_MAX_AGE,
    Endpoint,
    EndpointSpec,
    GpuSignal,
    HostSignal,
    PrometheusSignal,
    PushedSignal,
    QueueSignal,
    ReplicaSignal,
    Signal,
    TaskSignal,
    WaitingSignal,
)
from gpuscale.autoscaler.domain.planning import AdapterFacts, gpus_elsewhere, nodes_of
from gpuscale.autoscaler.domain.queues import QueueReading
from gpuscale.autoscaler.domain.replicas import Replica, ReplicaState
from gpuscale.autoscaler.domain.signals import Sample, queue_sample
from gpuscale.autoscaler.signals.fleet_metrics import FleetMetrics
from gpuscale.autoscaler.signals.polling import Poller
from gpuscale.autoscaler.signals.prometheus import Values, prometheus_sample
from gpuscale.autoscaler.signals.reported import ReportedMetrics
from gpuscale.autoscaler.signals.room import Shape, room_of, shape_of
from gpuscale.autoscaler.signals.waiting import Counts, waiting_sample
from gpuscale.common.runtime.clock import Clock


@dataclass(frozen=True, slots=True)
class SignalSources:
    """Samples the signals of endpoints.

    Attributes:
        reading: what a queue watcher (by id) read last; None where there is no such watcher.
        reported: metrics that programs report.
        fleet: readings of GPUs and hosts.
        prometheus: what asks each Prometheus server, by its name in the settings.
        waiting: what asks the allocator for the requests that wait.
        room: what asks the allocator how many more replicas there are GPUs for.
        clock: what ages are counted on.
    """

    reading: Callable[[str], QueueReading | None]
    reported: ReportedMetrics
    fleet: FleetMetrics
    prometheus: Mapping[str, Poller[str, Values]]
    waiting: Poller[None, Counts]
    room: Poller[Shape, int]
    clock: Clock

    def sample(self, endpoint: Endpoint, replicas: Sequence[Replica]) -> dict[str, Sample]:
        """What the sources of an endpoint's signals last said, by signal id.

        Args:
            endpoint: whose signals.
            replicas: those of its replicas that have not ended.
        """
        ready = [one for one in replicas if one.state is ReplicaState.READY]
        period = endpoint.spec.period
        return {
            signal.id: self._sample(endpoint.id, signal, ready, period) for signal in endpoint.spec.signals
        }

    def more(self, spec: EndpointSpec, adapters: Sequence[AdapterFacts], since: float = 0.0) -> int | None:
        """How many more replicas these adapters have GPUs for; None where nobody wants to know, or knows.

        An engine that gives out GPUs itself has as many as the endpoint may ask for: it alone knows, and lets them wait.
        What was asked before `since` does not count: GPUs that were granted after that would count twice.
        """
        if spec.gpu_gate not in ASKS_FOR_ROOM or not spec.template.gpu_count:
            return None
        if gpus_elsewhere(spec.template, adapters):
            return spec.max_replicas
        nodes = nodes_of(spec.template, adapters)
        if not nodes:
            return 0
        period = min(spec.period, DEFAULT_MAX_AGE) / 2
        return room_of(self.room.ask(shape_of(spec.template, nodes), period), self.clock.now(), since)

    def busy(self, endpoint: Endpoint) -> dict[str, float]:
        """How busy each replica of an endpoint says that it is, by id; nobody where the spec does not ask."""
        metric = endpoint.spec.busy_metric
        if not metric:
            return {}
        return self.reported.by_replica(endpoint.id, metric, self.clock.now(), DEFAULT_MAX_AGE)

    def keep(self, endpoint_id: str, replicas: Sequence[Replica]) -> None:
        """Forget what replicas of an endpoint reported, but for these, which have not ended."""
        self.reported.keep(endpoint_id, {one.id for one in replicas})

    def forget(self, endpoint_id: str) -> None:
        """Forget what was reported of an endpoint that is gone."""
        self.reported.forget(endpoint_id)

    def _sample(self, endpoint: str, signal: Signal, ready: Sequence[Replica], tick: float) -> Sample:
        match signal.source:
            case QueueSignal() as source:
                return queue_sample(source, self.reading(source.watcher))
            case GpuSignal() as source:
                own = [uuid for one in ready if one.lease is not None for uuid in one.lease.gpu_uuids]
                return self.fleet.gpus(source, own, signal.oldest)
            case HostSignal() as source:
                return self.fleet.hosts(source, signal.oldest)
            case PushedSignal(metric):
                return self.reported.of_endpoint(endpoint, metric)
            case ReplicaSignal(metric):
                ids = [one.id for one in ready]
                return self.reported.of_replicas(endpoint, metric, ids, self.clock.now(), signal.oldest)
            case PrometheusSignal(server, query):
                if server not in self.prometheus:
                    return Sample(problem=f"the settings name no prometheus {server!r}")
                return prometheus_sample(self.prometheus[server].ask(query, _often(signal, tick)))
            case TaskSignal():
                return self.reported.tasks_of(endpoint)
            case WaitingSignal() as source:
                return waiting_sample(source, self.waiting.ask(None, _often(signal, tick)))


def _often(signal: Signal, tick: float) -> float:
    """How often to ask, so that a tick finds an answer that is younger than the signal's max_age, and a new one."""
    return min(tick, signal.oldest) / 2
