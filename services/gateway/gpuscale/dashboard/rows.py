"""The rows and figures of each table, for the browser and the terminal alike. Pure, except for the clock of `humanize.ago`.

A row maps a column's id to the text of its cell; an unknown value is `-`, never 0. A `ResourceTable` has the cells of rows that
need their resource alone; functions make the other rows. Names and units of GPU readings come from the contract, so that a new
reading is shown without a change here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Generic, TypeAlias, TypeVar

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.client.states import Marks, capabilities, demand, node_state, problem, queued, replica_model
from gpuscale.common import names
from gpuscale.common.names import node_of
from gpuscale.common.wire import to_datetime
from gpuscale.dashboard import humanize
from gpuscale.dashboard.facts import Facts, GpuSummary

Row: TypeAlias = Mapping[str, object]
Columns: TypeAlias = Mapping[str, str]
"""Headings by id."""
T = TypeVar("T")


class ResourceTable(Generic[T]):
    """The heading and the cell of each column, by id. What has no heading is in the rows, but no column."""

    def __init__(self, **columns: tuple[str, Callable[[T], object]]) -> None:
        self.columns: Columns = {name: heading for name, (heading, _) in columns.items() if heading}
        self._cells = {name: cell for name, (_, cell) in columns.items()}

    def row(self, one: T) -> Row:
        """The row of a resource."""
        return {name: cell(one) for name, cell in self._cells.items()}

    def rows(self, every: Iterable[T]) -> list[Row]:
        """The rows of resources."""
        return [self.row(one) for one in every]


SEVERITIES = ("critical", "warning", "info")
"""Worst first."""


def whose(holder: str) -> str:
    """The endpoint of a holder that is a replica, otherwise the holder."""
    return names.short_holder(holder).partition("/")[0] if names.match(names.REPLICA, holder) else holder


# What fits a phone and 80 columns comes first: how busy it is, and who holds it.
GPUS = ResourceTable[GpuSummary](
    uuid=("", lambda gpu: gpu.uuid),
    gpu=("GPU", lambda gpu: gpu.label),
    gpu_to=("", lambda gpu: f"/gpus/{gpu.node}/{gpu.uuid}"),
    state=("state", lambda gpu: humanize.state(gpu.state)),
    util=("utilization", lambda gpu: humanize.number(gpu.utilization, "%")),
    held=("reserved by", lambda gpu: ", ".join(map(names.short_holder, gpu.holders))),
    memory=("memory", lambda gpu: f"{humanize.size(gpu.memory_used)} / {humanize.size(gpu.memory_total)}"),
    temperature=("temperature", lambda gpu: humanize.number(gpu.temperature, "°C")),
    power=("power", lambda gpu: f"{humanize.number(gpu.power)} / {humanize.number(gpu.power_limit, 'W')}"),
    model=(
        "model",
        lambda gpu: gpu.model + " (simulated)" * (gpu.simulated and "simulated" not in gpu.model.lower()),
    ),
)


NODES = ResourceTable[tuple[monitor_api.Node, Marks]](
    node=("node", lambda one: one[0].name.removeprefix("nodes/")),
    state=("state", lambda one: node_state(*one).lower()),
    gpus=("GPUs", lambda one: str(len(one[0].snapshot.gpus))),
    problem=("GPU problems", lambda one: problem(one[0]) or humanize.UNKNOWN),
)


def host_row(node: monitor_api.Node, marked: Marks) -> Row:
    """The row of a host in a table of GPUs: its CPU and memory, in the matching columns."""
    host = node.snapshot.host_reading
    used, total = (humanize.known(host, f"memory_{part}_bytes") for part in ("used", "total"))
    return {
        "gpu": node.name.removeprefix("nodes/"),
        "state": node_state(node, marked).lower(),
        "util": humanize.number(humanize.known(host, "cpu_percent"), "%"),
        "held": "(CPU and memory)",
        "memory": humanize.part(used, total),
        "model": f"load {host.load_1m:.1f} on {host.cpu_count} cores" if host.HasField("load_1m") else "",
        "why": problem(node),
    }


def matches(row: Row, text: str) -> bool:
    """Whether each word of the filter occurs in a cell of the row."""
    shown = " ".join(str(cell) for cell in row.values()).lower()
    return all(part in shown for part in text.lower().split())


def ordered(rows: Sequence[Row], column: str, *, descending: bool) -> list[Row]:
    """Rows sorted by a column; unknown values always come last."""
    known = [row for row in rows if row[column] not in {"", humanize.UNKNOWN}]
    known.sort(key=lambda row: sort_key(str(row[column])), reverse=descending)
    return known + [row for row in rows if row[column] in {"", humanize.UNKNOWN}]


def sort_key(cell: str) -> tuple[bool, float, str]:
    """Sorts numbers by value, `912 MiB` before `1.0 GiB`, and before words."""
    head, _, rest = cell.partition(" ")
    try:
        return (False, float(head) * humanize.WORTH.get(rest.partition(" ")[0], 1.0), cell)
    except ValueError:
        return (True, 0.0, cell)


def fleet_figures(nodes: Sequence[monitor_api.Node], gpus: Sequence[GpuSummary]) -> dict[str, str]:
    """Totals and use of the fleet; means are over the GPUs that can be read."""
    online = sum(node.state == monitor_api.NodeState.NODE_STATE_ONLINE for node in nodes)
    used = [gpu.memory_used for gpu in gpus if gpu.memory_used is not None]
    total = [gpu.memory_total for gpu in gpus if gpu.memory_total is not None]
    power = [gpu.power for gpu in gpus if gpu.power is not None]
    return {
        "nodes_online": f"{online} / {len(nodes)}",
        "GPUs": str(len(gpus)),
        "reserved": f"{sum(gpu.held_milli for gpu in gpus) / 1000:g}",
        "mean_utilization": humanize.number(mean(gpu.utilization for gpu in gpus), "%"),
        "memory_in_use": humanize.part(sum(used) if used else None, sum(total) if total else None),
        "power": humanize.power(sum(power) if power else None),
    }


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of the known values; None if there are none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def places(gpus: Iterable[tuple[str, int]]) -> str:
    """`atlas/0-3, boreas/0`: GPUs by node and index, consecutive ones as a range."""
    ranges: list[tuple[str, int, int]] = []
    for node, index in sorted(gpus):
        if ranges and ranges[-1][0] == node and index <= ranges[-1][2] + 1:
            ranges[-1] = (node, ranges[-1][1], index)
        else:
            ranges.append((node, index, index))
    return ", ".join(f"{node}/{first}" + (f"-{last}" if last > first else "") for node, first, last in ranges)


RESERVATIONS = ResourceTable[allocator_api.Reservation](
    name=("reservation", lambda one: one.name.removeprefix("reservations/")),
    name_to=("", lambda one: f"/{one.name}"),
    owner=("", lambda one: one.owner),
    holder=("holder", lambda one: names.short_holder(one.holder)),
    state=("state", lambda one: humanize.word(one, "state") + ",leaving" * one.HasField("revoke_time")),
    gpus=(
        "GPUs",
        lambda one: (
            f"{sum(gpu.milli or 1000 for gpu in one.gpus) / 1000:g}"
            if one.gpus
            else f"0 of {one.asked_gpu_count}"
            if one.asked_gpu_count and one.state == one.STATE_WAITING
            else humanize.UNKNOWN
        ),
    ),
    where=("where", lambda one: places((node_of(gpu), gpu.index) for gpu in one.gpus)),
    title=("", lambda one: one.job.title),
    # What a reservation alone does not tell.
    used=("used", lambda _: humanize.UNKNOWN),
    left=("time left", lambda _: humanize.UNKNOWN),
    priority=("priority", lambda one: one.priority),
    tenant=("tenant", lambda one: one.tenant),
    notes=(
        "",
        lambda one: (
            "; ".join(filter(None, (one.end_reason, *one.notes)))
            or (queued(one.job) if one.job.queue_reason else "")
        ),
    ),
)


def reservation_row(one: allocator_api.Reservation, gpus: Mapping[str, GpuSummary], now: datetime) -> Row:
    """The row of a reservation; `gpus` by UUID tell how much of it is used."""
    row = {**RESERVATIONS.row(one), "left": time_left(one, now)}
    held = one.gpus if one.state == one.STATE_ACTIVE else ()  # others may have those of one that ended
    known = [gpus[gpu.uuid] for gpu in held if gpu.uuid in gpus]
    busy, memory = mean(gpu.utilization for gpu in known), mean(gpu.memory_percent for gpu in known)
    if busy is not None or memory is not None:
        idle = " · idle" if one.usage.idle else ""
        row["used"] = f"{humanize.number(busy, '%')} busy, {humanize.number(memory, '%')} memory{idle}"
    return row


def waits(one: allocator_api.Reservation) -> bool:
    """Whether it is in the queue."""
    return one.state == allocator_api.Reservation.STATE_WAITING


def waits_longest(one: allocator_api.Reservation) -> tuple[bool, int]:
    """Sort key of reservations: waiting ones first, in the order of the queue."""
    return not waits(one), one.job.queue_position if waits(one) else 0


def time_left(one: allocator_api.Reservation, now: datetime) -> str:
    """The time until it is taken away or its lease ends; once renewed, which no watch reports, the length of a lease."""
    if not one.HasField("remaining"):
        return humanize.UNKNOWN
    if one.HasField("revoke_time"):
        return humanize.span((to_datetime(one.revoke_time) - now).total_seconds())
    left = (to_datetime(one.expire_time) - now).total_seconds()
    return humanize.span(left) if left > 0 else f"up to {humanize.length(one.ttl)}"


def reservation_figures(
    reservations: Iterable[allocator_api.Reservation], gpus: Sequence[GpuSummary]
) -> dict[str, str]:
    """How much is reserved, and how much of that is idle."""
    state = allocator_api.Reservation.State
    return {
        "holding": str(sum(one.state == state.STATE_ACTIVE for one in reservations)),
        "waiting": str(sum(map(waits, reservations))),
        "GPUs_reserved": f"{sum(gpu.held_milli for gpu in gpus) / 1000:g}",
        "GPUs_reserved_and_idle": f"{sum(gpu.idle_milli for gpu in gpus) / 1000:g}",
    }


def _bounds(one: autoscaler_api.Endpoint) -> str:
    return f"{one.spec.min_replicas} to {one.spec.max_replicas}"


ENDPOINTS = ResourceTable[autoscaler_api.Endpoint](
    name=("endpoint", lambda one: one.name.removeprefix("endpoints/")),
    name_to=("", lambda one: f"/{one.name}"),
    desired=("desired", lambda one: one.status.desired_replicas),
    granted=("granted", lambda one: one.status.granted_replicas),
    ready=("ready", lambda one: one.status.ready_replicas),
    starting=("starting", lambda one: one.status.starting_replicas),
    draining=("draining", lambda one: one.status.draining_replicas),
    bounds=("min to max", lambda one: _bounds(one) + (" · paused" if one.spec.paused else "")),
    why=("why", lambda one: one.status.summary),
)


def endpoint_figures(one: autoscaler_api.Endpoint) -> dict[str, str]:
    """The replicas of an endpoint, by state."""
    row = ENDPOINTS.row(one)
    figures = {state: str(row[state]) for state in ("desired", "granted", "starting", "ready", "draining")}
    return {**figures, "min_to_max": _bounds(one)}


CAPABILITY_SETS = ResourceTable[autoscaler_api.CapabilitySetStatus](
    set=("capability set", lambda one: one.id),
    desired=("desired", lambda one: one.desired_replicas),
    granted=("granted", lambda one: one.granted_replicas),
    ready=("ready", lambda one: one.ready_replicas),
    workers=("ready workers", lambda one: one.ready_workers),
    # Of a set that was removed while its replicas still exist.
    capabilities=("capabilities of each worker", lambda _: humanize.UNKNOWN),
    bounds=("min to max", lambda _: humanize.UNKNOWN),
)


def capability_set_rows(one: autoscaler_api.Endpoint) -> list[Row]:
    """A row for each capability set of an endpoint."""
    stated: dict[str, Row] = {}
    for each in one.spec.capability_sets:
        most = each.max_replicas if each.HasField("max_replicas") else one.spec.max_replicas
        bounds = f"{each.min_replicas} to {most}"
        stated[each.id] = {"capabilities": capabilities(each.capabilities), "bounds": bounds}
    return [
        {**CAPABILITY_SETS.row(status), **stated.get(status.id, {})} for status in one.status.capability_sets
    ]


def _change(before: int, after: int) -> str:
    return f"{before} → {after}" if before != after else f"{after}"


DECISIONS = ResourceTable[autoscaler_api.Decision](
    name=("", lambda one: one.name),
    time=("time (UTC)", lambda one: humanize.clock(one.create_time)),
    endpoint=("endpoint", lambda one: one.name.split("/")[1] if "/" in one.name else one.name),
    times=("times", lambda one: one.count),
    change=("change", lambda one: _change(one.before, one.wanted)),
    change_to=("", lambda one: f"/{one.name}"),
    granted=("granted", lambda one: one.granted),
    limit=("limited by", lambda one: humanize.word(one, "limited_by") if one.limited_by else ""),
    why=("why", lambda one: one.summary),
)
"""Repeats of a decision share its row."""
OBSERVATIONS = ResourceTable[autoscaler_api.Observation](
    signal=("signal", lambda seen: seen.signal),
    value=("value", lambda seen: f"{seen.value:g}" if seen.HasField("value") else humanize.UNKNOWN),
    status=("status", lambda seen: humanize.word(seen, "status")),
    age=("age", lambda seen: humanize.length(seen.age) if seen.HasField("age") else humanize.UNKNOWN),
    note=("note", lambda seen: "; ".join(filter(None, (seen.detail, *map(demand, seen.tasks.demands))))),
)
STEPS = ResourceTable[tuple[int, autoscaler_api.DecisionStep]](
    step=("step", lambda one: one[0]),
    stage=("stage", lambda one: humanize.word(one[1], "stage")),
    of=("rule or set", lambda one: one[1].capability_set or one[1].rule),
    change=("change", lambda one: _change(one[1].before, one[1].after)),
    code=("reason", lambda one: humanize.word(one[1], "code")),
    why=("why", lambda one: one[1].text),
)
"""The count before and after each stage of a decision, by number."""


REPLICAS = ResourceTable[autoscaler_api.Replica](
    name=("replica", lambda one: one.name.rsplit("/", 1)[-1]),
    name_to=("", lambda one: f"/{one.name}"),
    state=("state", lambda one: humanize.word(one, "state")),
    node=("node", lambda one: one.node.removeprefix("nodes/")),
    gpus=("GPUs", replica_model),
    age=("age", lambda one: humanize.ago(one.create_time)),
    reason=("reason", lambda one: one.reason),
)
HEALTH = ResourceTable[monitor_api.HealthEvent](
    name=("", lambda one: one.name),
    uuid=("", lambda one: one.uuid),
    severity=("severity", lambda one: humanize.word(one, "severity")),
    check=("check", lambda one: humanize.word(one, "check")),
    where=("where", lambda one: one.node),
    where_to=("", lambda one: one.uuid and f"/gpus/{one.node.removeprefix('nodes/')}/{one.uuid}"),
    message=("what happened", lambda one: one.message),
    action=("what to do", lambda one: humanize.word(one, "recommended_action")),
    since=("since", lambda one: humanize.ago(one.start_time)),
    count=("times", lambda one: one.count),
)


def replica_rows(facts: Facts, endpoint: str) -> list[Row]:
    """The rows of an endpoint's replicas; a GPU by its label while it is known."""
    shown: list[Row] = []
    for one in facts.replicas:
        if not one.name.startswith(f"{endpoint}/"):
            continue
        row, found = REPLICAS.row(one), _indexes(facts, one.node)
        known = places((str(row["node"]), found[uuid]) for uuid in one.gpu_uuids if uuid in found)
        told = (str(row["gpus"]), known, *(uuid for uuid in one.gpu_uuids if uuid not in found))
        shown.append({**row, "gpus": ", ".join(filter(None, told))})
    return shown


def _indexes(facts: Facts, node: str) -> dict[str, int]:
    """The GPUs of a node by UUID; empty while it is unknown."""
    return {gpu.uuid: gpu.index for gpu in facts.nodes[node].snapshot.gpus} if node in facts.nodes else {}


def health_rows(facts: Facts) -> list[Row]:
    """The rows of unresolved events, worst first; a GPU by its label while it is known."""
    ranks = {severity: rank for rank, severity in enumerate(SEVERITIES)}
    shown: list[Row] = []
    for event in facts.events:
        index = _indexes(facts, event.node).get(event.uuid)
        place = f" {event.uuid}".rstrip() if index is None else f"/{index}"
        shown.append({**HEALTH.row(event), "where": f"{event.node.removeprefix('nodes/')}{place}"})
    return sorted(shown, key=lambda row: (ranks.get(str(row["severity"]), -1), str(row["name"])))


TOPICS: Mapping[str, tuple[str, ...]] = {
    topic: tuple(names.split()) or ("",)
    for topic, names in {
        "activity": "utilization memory_util encoder decoder graphics sm_a sm_o tensor memory_b fp",
        "clocks": "sm_clock memory_clock video_clock performance throttle",
        "throttled for": "power_violation thermal sync_boost board_limit low_util reliability",
        "power and heat": "temperature memory_temperature power energy fan",
        "memory and errors": "memory ecc retired remapped recovery",
        "PCIe": "pcie bar1",
        "NVLink": "nvlink",
        "modes": "",
    }.items()
}
"""Prefixes of the readings of each topic; a reading belongs to the first topic that matches."""
_LEFT_OUT = {"throttle_reason_mask", "processes", "absent_readings", "age"}
_UNITS: Mapping[str, Callable[[Any], str]] = {
    "bytes": humanize.size,
    "bytes per second": lambda rate: f"{humanize.size(rate)}/s",
    "percent": lambda value: humanize.number(value, "%", 1),
    "celsius": lambda value: humanize.number(value, "°C"),
    "watts": lambda value: humanize.number(value, "W"),
    "joules": lambda value: humanize.number(value / 3.6e6, "kWh", 1),
    "mhz": lambda value: humanize.number(value, "MHz"),
    "seconds": humanize.span,
    "count": str,
}


def by_topic(read: types_api.GpuReading) -> dict[str, list[Row]]:
    """The readings of each topic, zeros included; an absent reading has no row."""
    found: dict[str, list[Row]] = {topic: [] for topic in TOPICS}
    reading: Any = read
    for field in reading.DESCRIPTOR.fields:
        value: Any = getattr(reading, field.name)
        read_as = "throttle_reason_mask" if field.is_repeated else field.name
        if field.name in _LEFT_OUT or not (reading.HasField(read_as) or (field.is_repeated and value)):
            continue
        topic = next(topic for topic, names in TOPICS.items() if field.name.startswith(names))
        name: str = field.name.replace("_", " ")
        unit = next((unit for unit in sorted(_UNITS, key=len, reverse=True) if name.endswith(f" {unit}")), "")
        if field.is_repeated:
            shown = ", ".join(value) or "none"
        elif isinstance(value, bool):
            shown = "yes" if value else "no"
        else:
            shown = humanize.word(reading, field.name) if field.enum_type else _UNITS.get(unit, str)(value)
        rate = " rate" if unit.endswith("second") else ""
        words = [humanize.WRITTEN.get(word, word) for word in (name.removesuffix(unit) + rate).split()]
        found[topic].append({"reading": " ".join(words), "value": shown})
    return found


def _use(process: types_api.GpuProcess) -> str:
    """Its utilization, and that of the encoders and decoders if it uses them."""
    words = {"": "", "encoder_": ", encoder ", "decoder_": ", decoder "}
    shares = {word: getattr(process, f"{name}utilization_percent") for name, word in words.items()}
    if not process.HasField("utilization_percent"):
        return humanize.UNKNOWN
    return "".join(word + humanize.number(share, "%") for word, share in shares.items() if share or not word)


PROCESSES = ResourceTable[types_api.GpuProcess](
    pid=("process", lambda one: str(one.pid)),
    user=("user", lambda one: one.user or humanize.UNKNOWN),
    program=("program", lambda one: one.program or one.command or humanize.UNKNOWN),
    memory=("memory", lambda one: humanize.size(humanize.known(one, "memory_used_bytes"))),
    used=("utilization", _use),
    reservation=(
        "reservation",
        lambda one: one.reservation.removeprefix("reservations/") or ("none", "unknown")[one.holder_unknown],
    ),
    reservation_to=("", lambda one: one.reservation and f"/{one.reservation}"),
    start=("since", lambda one: humanize.clock(one.start_time)),
    container=("pod or container", lambda one: one.pod or one.container),
)
