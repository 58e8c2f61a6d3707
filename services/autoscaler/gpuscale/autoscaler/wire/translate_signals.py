"""Signals between the wire and the model. What is absent on one side is absent on the other."""

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain.model import (
    DEFAULT_LAST_TTL,
    GpuSignal,
    HostSignal,
    OnMissing,
    PrometheusSignal,
    PushedSignal,
    QueueCount,
    QueueSignal,
    ReplicaSignal,
    Signal,
    Source,
    TaskSignal,
    WaitingSignal,
)
from gpuscale.autoscaler.domain.series import Aggregation
from gpuscale.common.names import NODE, WATCHER, node_name, parse, watcher_name
from gpuscale.common.wire import optional_seconds, to_duration

QUEUE_COUNTS = {api.QueueCount.Value(f"QUEUE_COUNT_{one.name}"): one for one in QueueCount}
_AGGREGATIONS = {api.Aggregation.Value(f"AGGREGATION_{one.name}"): one for one in Aggregation}
_ON_MISSING = {api.OnMissing.Value(f"ON_MISSING_{one.name}"): one for one in OnMissing}


def signal_from_wire(wire: api.Signal, path: str) -> Signal:
    """The signal of a message that has a source.

    Raises:
        InvalidArgumentError: the name of a watcher or node is none.
    """
    ttl = optional_seconds(wire, "last_ttl")
    return Signal(
        wire.id,
        _source_from_wire(wire, path),
        optional_seconds(wire, "max_age"),
        across=_AGGREGATIONS.get(wire.across, Aggregation.AVG),
        window=optional_seconds(wire, "window"),
        over_window=_AGGREGATIONS.get(wire.over_window, Aggregation.AVG),
        on_missing=_ON_MISSING.get(wire.on_missing, OnMissing.HOLD),
        last_ttl=DEFAULT_LAST_TTL if ttl is None else ttl,
        activation_threshold=wire.activation_threshold,
        counts_work=wire.counts_work,
    )


def signal_to_wire(signal: Signal) -> api.Signal:
    """The message of a signal; defaults are left out."""
    wire = api.Signal(id=signal.id, counts_work=signal.counts_work)
    if signal.max_age is not None:
        wire.max_age.CopyFrom(to_duration(signal.max_age))
    if signal.across is not Aggregation.AVG:
        wire.across = api.Aggregation.Value(f"AGGREGATION_{signal.across.name}")
    if signal.window is not None:
        wire.window.CopyFrom(to_duration(signal.window))
    if signal.over_window is not Aggregation.AVG:
        wire.over_window = api.Aggregation.Value(f"AGGREGATION_{signal.over_window.name}")
    if signal.on_missing is not OnMissing.HOLD:
        wire.on_missing = api.OnMissing.Value(f"ON_MISSING_{signal.on_missing.name}")
    if signal.last_ttl != DEFAULT_LAST_TTL:
        wire.last_ttl.CopyFrom(to_duration(signal.last_ttl))
    if signal.activation_threshold:
        wire.activation_threshold = signal.activation_threshold
    _source_to_wire(signal.source, wire)
    return wire


def _source_from_wire(wire: api.Signal, path: str) -> Source:
    match wire.WhichOneof("source"):
        case "gpu":
            return GpuSignal(wire.gpu.metric, _nodes(wire.gpu, f"{path}.gpu"), wire.gpu.own_replicas)
        case "host":
            return HostSignal(wire.host.metric, _nodes(wire.host, f"{path}.host"))
        case "pushed":
            return PushedSignal(wire.pushed.metric)
        case "replicas":
            return ReplicaSignal(wire.replicas.metric)
        case "prometheus":
            return PrometheusSignal(wire.prometheus.server, wire.prometheus.query)
        case "tasks":
            return TaskSignal()
        case "waiting":
            return WaitingSignal(wire.waiting.tenant)
        case _:
            watcher = parse(WATCHER, wire.queue.watcher, field=f"{path}.queue.watcher")["watcher"]
            return QueueSignal(watcher, QUEUE_COUNTS[wire.queue.count])


def _nodes(wire: api.GpuSignal | api.HostSignal, path: str) -> frozenset[str]:
    found = (parse(NODE, name, field=f"{path}.nodes[{i}]")["node"] for i, name in enumerate(wire.nodes))
    return frozenset(found)


def _source_to_wire(source: Source, wire: api.Signal) -> None:
    """Set the source of a message."""
    match source:
        case QueueSignal(watcher, count):
            counted = api.QueueCount.Value(f"QUEUE_COUNT_{count.name}")
            wire.queue.CopyFrom(api.QueueSignal(watcher=watcher_name(watcher), count=counted))
        case GpuSignal(metric, nodes, own):
            names = [node_name(node) for node in sorted(nodes)]
            wire.gpu.CopyFrom(api.GpuSignal(metric=metric, nodes=names, own_replicas=own))
        case HostSignal(metric, nodes):
            names = [node_name(node) for node in sorted(nodes)]
            wire.host.CopyFrom(api.HostSignal(metric=metric, nodes=names))
        case PushedSignal(metric):
            wire.pushed.CopyFrom(api.PushedSignal(metric=metric))
        case ReplicaSignal(metric):
            wire.replicas.CopyFrom(api.ReplicaSignal(metric=metric))
        case PrometheusSignal(server, query):
            wire.prometheus.CopyFrom(api.PrometheusSignal(server=server, query=query))
        case TaskSignal():
            wire.tasks.SetInParent()
        case WaitingSignal(tenant):
            wire.waiting.CopyFrom(api.WaitingSignal(tenant=tenant))
