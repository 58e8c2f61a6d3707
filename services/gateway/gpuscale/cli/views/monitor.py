"""Nodes and GPUs, recordings, health events, the audit log, history as tables and charts, and trends."""

import time
from collections.abc import Callable, Iterator, Mapping

from gpuscale.api.audit import v1 as audit_api
from gpuscale.api.monitor import v1 as api
from gpuscale.api.types import v1 as types_api
from gpuscale.cli.console.cells import (
    Column,
    View,
    counted_models,
    duration,
    gpu_model,
    holder,
    memory_used,
    number,
    percent,
    short,
    short_model,
    since,
    size,
    text,
    word,
)
from gpuscale.cli.console.output import ABSENT
from gpuscale.cli.grammar.jsonpath import parse_path
from gpuscale.cli.grammar.parameters import local_text
from gpuscale.client.states import NO_MARKS, Marks, clock_ahead, gpu_state, node_state, problem
from gpuscale.common.wire import seconds, to_datetime


def gpu_count(node: api.Node) -> str:
    """`8 x H100 80GB HBM3`, `4 x A100, 4 x L40`, or `4 x … SIMULATED`; `-` where GPUs cannot be read."""
    if node.snapshot.gpu_problem and not node.snapshot.gpus:
        return ABSENT
    return counted_models(node.snapshot.gpus, simulated=node.snapshot.simulated)


_LOADS = ("load_1m", "load_5m", "load_15m")


def _power(node: api.Node) -> str:
    """The power draw of its GPUs and their limits, if all are known."""
    readings = [gpu.reading for gpu in node.snapshot.gpus if not gpu.parent_uuid]
    if not readings or not all(
        one.HasField("power_watts") and one.HasField("power_limit_watts") for one in readings
    ):
        return ABSENT
    return f"{sum(one.power_watts for one in readings):.0f}/{sum(one.power_limit_watts for one in readings):.0f}W"


FAR = 30.0
"""Clock difference in seconds above which certificates and tokens are rejected."""


def off(ahead: float) -> str:
    """How far a clock is from this host's."""
    return f"is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} this host's"


def node_problem(node: api.Node) -> str:
    """The problem of a node's GPUs, or of its clock; empty if there is none, or a watch asked for no time."""
    ahead = clock_ahead(node, time.time()) or 0.0
    return problem(node) or (f"its clock {off(ahead)}" if abs(ahead) > FAR else "")


def nodes(marked: Marks = NO_MARKS, *, problems: bool = False) -> View[api.Node]:
    """The view of nodes, given what is cordoned; with `problems` the narrow table shows them too."""
    return View(
        "nodes",
        (
            Column("NAME", lambda node: short(node.name)),
            Column("STATE", lambda node: node_state(node, marked), own=("DEGRADED", "CORDONED", "DRAINING")),
            Column("GPUS", gpu_count),
            Column("CPU", lambda node: number(node.snapshot.host_reading, "cpu_percent", percent)),
            Column("CORES", lambda node: number(node.snapshot.host_reading, "cpu_count"), wide=True),
            Column("MEMORY", lambda node: memory_used(node.snapshot.host_reading)),
            Column(
                "LOAD",
                lambda node: " ".join(
                    number(node.snapshot.host_reading, field, "{:.2f}".format) for field in _LOADS
                ),
                spare=True,
            ),
            Column("POWER", _power, spare=True),
            Column("AGE", lambda node: duration(node.snapshot, "age"), moving=True, spare=True),
            Column("HOSTNAME", lambda node: text(node.snapshot.host.hostname), wide=True),
            Column("SYSTEM", lambda node: text(node.snapshot.host.operating_system), wide=True),
            Column("DRIVER", lambda node: text(node.snapshot.host.driver_version), wide=True),
            Column("AGENT", lambda node: text(node.agent_version), wide=True),
            Column("PROBLEM", lambda node: text(node_problem(node)), wide=not problems),
        ),
        labels=parse_path("snapshot.host.labels"),
    )


def gpus(holders: Mapping[str, str] | None, marked: Marks = NO_MARKS) -> View[types_api.Gpu]:
    """The view of GPUs, given the holder of each by UUID, or None without that column, and what is cordoned."""
    of_holders: list[Column[types_api.Gpu]] = []
    if holders is not None:
        of_holders = [Column("HOLDER", lambda gpu: holder(holders.get(gpu.uuid, "")))]
    return View[types_api.Gpu](
        "gpus",
        (
            Column("NODE", lambda gpu: short(gpu.name).partition("/")[0]),
            Column("GPU", lambda gpu: str(gpu.index)),
            Column("MODEL", short_model, own=None),
            Column("STATE", lambda gpu: gpu_state(gpu, marked), own=("QUARANTINED", "CORDONED", "DRAINING")),
            Column("UTIL", lambda gpu: number(gpu.reading, "utilization_percent", percent)),
            Column("MEMORY", lambda gpu: memory_used(gpu.reading)),
            Column("FREE", lambda gpu: number(gpu.reading, "memory_free_bytes", size), spare=True),
            Column(
                "TEMP", lambda gpu: number(gpu.reading, "temperature_celsius", "{:.0f}C".format), spare=True
            ),
            Column("POWER", lambda gpu: number(gpu.reading, "power_watts", "{:.0f}W".format), spare=True),
            Column(
                "LIMIT", lambda gpu: number(gpu.reading, "power_limit_watts", "{:.0f}W".format), wide=True
            ),
            Column("CLOCK", lambda gpu: number(gpu.reading, "sm_clock_mhz", "{:.0f}MHz".format), wide=True),
            Column("PROCESSES", lambda gpu: str(len(gpu.reading.processes)), wide=True),
            *of_holders,
            Column("AGE", lambda gpu: duration(gpu.reading, "age"), moving=True, spare=True),
            Column("QUARANTINE", lambda gpu: text(gpu.quarantine), wide=True),
            Column("PRODUCT", gpu_model, wide=True),
            Column("PCI", lambda gpu: text(gpu.pci_bus_id), wide=True),
            Column("UUID", lambda gpu: gpu.uuid, spare=True),
        ),
    )


def _below(path: str, fields: str) -> list[str]:
    return [f"{path}.{field}" for field in fields.split()]


_OF_GPU = _below("snapshot.gpus", "index model simulated state quarantine parent_uuid")
_DRAWN = "power_watts power_limit_watts"
NODE_FIELDS = (
    *("state", "agent_version"),
    *_below("snapshot", "age simulated gpu_problem"),
    *_below("snapshot.host", "hostname operating_system driver_version"),
    *_below("snapshot.host_reading", "cpu_percent cpu_count memory_used_bytes memory_total_bytes"),
    *_below("snapshot.host_reading", " ".join(_LOADS)),
    *_OF_GPU,
    *_below("snapshot.gpus.reading", _DRAWN),
)
"""The fields of a node that the view of nodes shows."""
GPU_FIELDS = (
    *_OF_GPU,
    *_below("snapshot.gpus", "name uuid pci_bus_id"),
    *_below("snapshot.gpus.reading", f"{_DRAWN} utilization_percent temperature_celsius sm_clock_mhz age"),
    *_below("snapshot.gpus.reading", "memory_used_bytes memory_total_bytes memory_free_bytes processes.pid"),
)
"""The fields of a node that the view of GPUs shows."""

PROCESSES = View[api.NodeProcess](
    "processes",
    (
        Column("PID", lambda one: str(one.process.pid)),
        Column("NODE", lambda one: short(one.gpu).partition("/")[0]),
        Column("GPU", lambda one: str(one.gpu_index)),
        Column("USER", lambda one: text(one.process.user)),
        Column("MEMORY", lambda one: number(one.process, "memory_used_bytes", size)),
        Column("UTIL", lambda one: number(one.process, "utilization_percent", percent)),
        Column("MEM%", lambda one: number(one.process, "memory_utilization_percent", percent), wide=True),
        Column("ENC", lambda one: number(one.process, "encoder_utilization_percent", percent), wide=True),
        Column("DEC", lambda one: number(one.process, "decoder_utilization_percent", percent), wide=True),
        Column("STARTED", lambda one: since(one.process, "start_time"), moving=True, spare=True),
        Column("RESERVATION", lambda one: text(short(one.process.reservation))),
        Column("POD", lambda one: text(one.process.pod), wide=True),
        Column("CONTAINER", lambda one: text(one.process.container), wide=True),
        Column("PROGRAM", lambda one: text(one.process.program or one.process.command)),
    ),
)
RECORDINGS = View[api.Recording](
    "recordings",
    (
        Column("NAME", lambda recording: short(recording.name)),
        Column("STATE", lambda recording: word(recording, "state")),
        Column("GPUS", lambda recording: str(len(recording.gpus))),
        Column("SAMPLES", lambda recording: str(recording.sample_count)),
        Column("RAN", lambda recording: duration(recording, "duration"), moving=True),
        Column("INTERVAL", lambda recording: duration(recording, "interval"), spare=True),
        Column("LIMIT", lambda recording: duration(recording, "max_duration"), wide=True),
        Column("AGE", lambda recording: since(recording, "start_time"), moving=True),
    ),
)


def _figures(
    metric: "api.Metric.ValueType", show: Callable[[float], str]
) -> Callable[[api.RecordedGpu], str]:
    """`min mean max` of a metric; `-` if it was never read."""

    def cell(gpu: api.RecordedGpu) -> str:
        found = [stats for stats in gpu.stats if stats.metric == metric]
        return " ".join(map(show, (found[0].min, found[0].mean, found[0].max))) if found else ABSENT

    return cell


RECORDED_GPUS = View[api.RecordedGpu](
    "gpus",
    (
        Column("NODE", lambda gpu: short(gpu.name).partition("/")[0]),
        Column("GPU", lambda gpu: str(gpu.index)),
        Column("MODEL", lambda gpu: text(gpu.model), spare=True),
        Column("SAMPLES", lambda gpu: str(gpu.sample_count), spare=True),
        Column("UTIL min mean max", _figures(api.Metric.METRIC_UTILIZATION_PERCENT, percent)),
        Column("MEMORY min mean max", _figures(api.Metric.METRIC_MEMORY_USED_BYTES, size)),
        Column(
            "TEMP min mean max", _figures(api.Metric.METRIC_TEMPERATURE_CELSIUS, "{:.0f}C".format), spare=True
        ),
        Column("POWER min mean max", _figures(api.Metric.METRIC_POWER_WATTS, "{:.0f}W".format)),
        Column("CLOCK min mean max", _figures(api.Metric.METRIC_SM_CLOCK_MHZ, "{:.0f}MHz".format), wide=True),
        Column("UUID", lambda gpu: gpu.uuid, wide=True),
    ),
)

HEALTH = View[api.HealthEvent](
    "healthEvents",
    (
        Column("SEVERITY", lambda event: word(event, "severity")),
        Column("FATAL", lambda event: "yes" if event.fatal else "no", spare=True),
        Column("CHECK", lambda event: word(event, "check"), spare=True),
        Column("NODE", lambda event: event.node.rpartition("/")[2]),
        Column("UUID", lambda event: text(event.uuid)),
        Column("AGE", lambda event: since(event, "start_time"), moving=True),
        Column("RESOLVED", lambda event: since(event, "resolved_time"), moving=True, spare=True),
        Column("COUNT", lambda event: str(event.count), wide=True),
        Column("CLEARED", lambda event: "yes" if event.cleared else "no", wide=True),
        Column("ACTION", lambda event: word(event, "recommended_action")),
        Column("MESSAGE", lambda event: text(event.message)),
        Column("NAME", lambda event: short(event.name), wide=True),
    ),
)

AUDIT: "View[audit_api.AuditEvent]" = View(
    "auditEvents",
    (
        Column("TIME", lambda event: local_text(to_datetime(event.end_time))),
        Column("CALLER", lambda event: text(event.caller)),
        Column("ROLE", lambda event: word(event, "role"), spare=True),
        Column("METHOD", lambda event: event.method.rpartition("/")[2]),
        Column("RESOURCE", lambda event: text(event.resource or ",".join(event.reservations))),
        Column("CODE", lambda event: event.code),
        Column("TOOK", lambda event: duration(event, "duration"), spare=True),
        Column("BY", lambda event: text(event.recognised_by), spare=True),
        Column("FROM", lambda event: text(event.peer), spare=True),
        Column("VIA", lambda event: text(event.via), wide=True),
        Column("REQUEST", lambda event: text(event.request_id), wide=True),
        Column("DROPPED", lambda event: str(event.dropped_count), wide=True),
    ),
)


def amount(metric: "api.Metric.ValueType", value: float) -> str:
    """A value of a metric: bytes with a unit, others as a number."""
    return size(value) if metric == api.Metric.METRIC_MEMORY_USED_BYTES else f"{value:.6g}"


def _slope(trend: api.Trend) -> str:
    """Growth per hour, with its sign; `-` if there are too few samples."""
    if not trend.HasField("slope_per_hour"):
        return ABSENT
    sign = "-" if trend.slope_per_hour < 0 else "+"
    return sign + amount(trend.stats.metric, float(f"{abs(trend.slope_per_hour):.4g}"))


SERIES = View[api.HistorySeries](
    "series",
    (
        Column("NAME", lambda series: short(series.name)),
        Column("METRIC", lambda series: word(series, "metric")),
        Column("TIME", lambda series: local_text(to_datetime(series.points[0].start_time))),
        Column("MIN", lambda series: amount(series.metric, series.points[0].min)),
        Column("MEAN", lambda series: amount(series.metric, series.points[0].mean)),
        Column("MAX", lambda series: amount(series.metric, series.points[0].max)),
        Column("SAMPLES", lambda series: str(series.points[0].sample_count)),
    ),
)
"""Series of one point each."""

TRENDS = View[api.Trend](
    "trends",
    (
        Column("NAME", lambda trend: short(trend.name)),
        Column("METRIC", lambda trend: word(trend.stats, "metric")),
        Column("MIN", lambda trend: amount(trend.stats.metric, trend.stats.min)),
        Column("MEAN", lambda trend: amount(trend.stats.metric, trend.stats.mean)),
        Column("MAX", lambda trend: amount(trend.stats.metric, trend.stats.max)),
        Column("PER HOUR", _slope),
        Column("SAMPLES", lambda trend: str(trend.stats.sample_count)),
    ),
)


MARGIN = 10
"""Width of the scale."""
_HEIGHT = 5
"""Lines of a chart. A column is the mean of one or more steps, blank without samples."""
_BLOCKS = " ▁▂▃▄▅▆▇█"
_PART = len(_BLOCKS) - 1


def drawn(answer: api.QueryHistoryResponse, width: int) -> Iterator[str]:
    """The lines of a chart of each series with points."""
    step = seconds(answer.step) or 1.0
    for series in answer.series:
        if not series.points:
            continue
        first, last = (to_datetime(series.points[place].start_time) for place in (0, -1))
        per_column = max(step, ((last - first).total_seconds() + step) / (width - MARGIN))
        columns: dict[int, list[float]] = {}
        for point in series.points:
            place = int((to_datetime(point.start_time) - first).total_seconds() / per_column)
            columns.setdefault(place, []).append(point.mean)
        means = {place: sum(values) / len(values) for place, values in columns.items()}
        low, high = min(0.0, *means.values()), max(means.values())
        whole = [
            max(1, round((means[place] - low) / ((high - low) or 1.0) * _HEIGHT * _PART))
            if place in means
            else 0
            for place in range(max(means) + 1)
        ]
        yield f"{short(series.name)} {word(series, 'metric').lower()}"
        for row in reversed(range(_HEIGHT)):
            bound = high if row == _HEIGHT - 1 else low
            scale = amount(series.metric, bound) if row in {0, _HEIGHT - 1} else ""
            yield (
                f"{scale:>{MARGIN - 2}} "
                + "".join(_BLOCKS[min(_PART, max(0, level - row * _PART))] for level in whole).rstrip()
            )
        yield f"{'':{MARGIN - 1}}{local_text(first)} to {local_text(last)}"
        yield ""
