"""Endpoints with their replicas, rules and decisions; queue watchers, adapters and reported metrics; presets and backtests."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from google.protobuf.json_format import MessageToDict

from gpuscale.api.autoscaler import v1 as api
from gpuscale.cli.console.cells import Column, View, duration, number, short, since, text, word
from gpuscale.cli.console.output import ABSENT, Output
from gpuscale.cli.grammar.parameters import format_duration, local_text
from gpuscale.client.states import capabilities, demand, replica_model
from gpuscale.client.tuning import Trial
from gpuscale.common.sizes import counted
from gpuscale.common.wire import seconds, to_datetime


def _ready_sets(endpoint: api.Endpoint) -> str:
    sets = endpoint.status.capability_sets
    return text(", ".join(f"{one.id} {one.ready_replicas}/{one.desired_replicas}" for one in sets))


def _gpus_each(endpoint: api.Endpoint) -> str:
    template = endpoint.spec.template
    return str(template.ask.gpu_count if template.HasField("ask") else template.gpu_count)


ENDPOINTS = View[api.Endpoint](
    "endpoints",
    (
        Column("NAME", lambda endpoint: short(endpoint.name)),
        Column("BOUNDS", lambda endpoint: f"{endpoint.spec.min_replicas}-{endpoint.spec.max_replicas}"),
        Column("DESIRED", lambda endpoint: str(endpoint.status.desired_replicas)),
        Column("GRANTED", lambda endpoint: str(endpoint.status.granted_replicas)),
        Column("STARTING", lambda endpoint: str(endpoint.status.starting_replicas), wide=True),
        Column("READY", lambda endpoint: str(endpoint.status.ready_replicas)),
        Column("DRAINING", lambda endpoint: str(endpoint.status.draining_replicas), wide=True),
        Column("GPUS-EACH", _gpus_each, wide=True),
        Column("TEMPLATE", lambda endpoint: text(endpoint.spec.template.template), wide=True),
        Column("SETS", _ready_sets, wide=True),
        Column("TENANT", lambda endpoint: text(endpoint.tenant), wide=True),
        Column("AGE", lambda endpoint: since(endpoint, "create_time"), moving=True, spare=True),
        Column(
            "WHY",
            lambda endpoint: text(
                ("PAUSED " if endpoint.spec.paused else "") + endpoint.status.summary
            ).rstrip(),
        ),
    ),
)


def workers(group: api.WorkerGroup) -> str:
    """Workers and what each can do, such as `4 x gpu=2,high_memory`."""
    return f"{group.workers} x {capabilities(group.capabilities)}" if group.workers else ""


def _why(replica: api.Replica) -> str:
    """The reason for its state; if it will lose its GPUs, also when."""
    if not replica.HasField("revoke_time"):
        return text(replica.reason)
    left = (to_datetime(replica.revoke_time) - datetime.now(UTC)).total_seconds()
    return f"leaves in {format_duration(max(0.0, left))}: {replica.reason}"


REPLICAS = View[api.Replica](
    "replicas",
    (
        Column("NAME", lambda replica: short(replica.name)),
        Column("STATE", lambda replica: word(replica, "state")),
        Column("NODE", lambda replica: short(replica.node)),
        Column("GPUS", lambda replica: str(len(replica.gpu_uuids))),
        Column("RESERVATION", lambda replica: short(replica.reservation), spare=True),
        Column("PID", lambda replica: text(str(replica.pid or "")), spare=True),
        Column("EXIT", lambda replica: number(replica, "exit_code"), spare=True),
        Column("AGE", lambda replica: since(replica, "create_time"), moving=True),
        Column("ADAPTER", lambda replica: short(replica.adapter), wide=True),
        Column("SET", lambda replica: text(replica.capability_set), wide=True),
        Column("CAN", lambda replica: text(workers(replica.workers)), wide=True),
        Column("MODEL", lambda replica: text(replica_model(replica)), wide=True),
        Column("UUIDS", lambda replica: text(",".join(replica.gpu_uuids)), wide=True),
        Column("WHY", _why, moving=True),
    ),
)


def _queues(watcher: api.QueueWatcher) -> str:
    """The watched queues, or their pattern between slashes."""
    spec = watcher.spec
    return f"/{spec.queue_pattern}/" if spec.queue_pattern else text(spec.queue or ", ".join(spec.queues))


WATCHERS = View[api.QueueWatcher](
    "queueWatchers",
    (
        Column("NAME", lambda watcher: short(watcher.name)),
        Column("BROKER", lambda watcher: text(watcher.spec.broker), spare=True),
        Column("VHOST", lambda watcher: watcher.spec.virtual_host or "/", wide=True),
        Column("QUEUE", _queues),
        Column("STATE", lambda watcher: word(watcher.status, "state")),
        Column("READY", lambda watcher: number(watcher.status, "ready_count", "{:.0f}".format)),
        Column("UNACKED", lambda watcher: number(watcher.status, "unacked_count", "{:.0f}".format)),
        Column(
            "CONSUMERS", lambda watcher: number(watcher.status, "consumer_count", "{:.0f}".format), spare=True
        ),
        Column("READ", lambda watcher: duration(watcher.status, "age"), moving=True, spare=True),
        Column("MESSAGE", lambda watcher: text(watcher.status.message)),
    ),
)

DECISIONS = View[api.Decision](
    "decisions",
    (
        Column("NAME", lambda decision: short(decision.name)),
        Column("LAST", lambda decision: since(decision, "last_time"), moving=True),
        Column("TIMES", lambda decision: str(decision.count), spare=True),
        Column("BEFORE", lambda decision: str(decision.before), spare=True),
        Column("WANTED", lambda decision: str(decision.wanted)),
        Column("GRANTED", lambda decision: str(decision.granted)),
        Column("LIMITED-BY", lambda decision: word(decision, "limited_by"), spare=True),
        Column("FIRST", lambda decision: since(decision, "create_time"), wide=True, moving=True),
        Column("SUMMARY", lambda decision: text(decision.summary)),
    ),
)


ADAPTERS = View[api.Adapter](
    "adapters",
    (
        Column("NAME", lambda adapter: short(adapter.name)),
        Column("KIND", lambda adapter: text(adapter.kind)),
        Column("STATE", lambda adapter: word(adapter, "state")),
        Column("NODE", lambda adapter: short(adapter.node)),
        Column("REPLICAS", lambda adapter: str(adapter.replica_count)),
        Column("MOST", lambda adapter: text(str(adapter.max_replicas or ""))),
        Column("TEMPLATES", lambda adapter: text(",".join(adapter.templates)), spare=True),
        Column(
            "CAN",
            lambda adapter: text(
                ", ".join(of.name.replace("_", " ") for of, _ in adapter.capabilities.ListFields())
            ),
            wide=True,
        ),
        Column("SEEN", lambda adapter: since(adapter, "last_seen_time"), moving=True),
    ),
)

METRICS = View[api.ReportedMetric](
    "metrics",
    (
        Column("OF", lambda metric: short(metric.name)),
        Column("METRIC", lambda metric: metric.value.metric),
        Column("VALUE", lambda metric: f"{metric.value.value:g}"),
        Column("AGE", lambda metric: duration(metric.value, "age"), moving=True),
    ),
)


def _does(one: api.EndpointRule) -> str:
    """The kind of a rule with its fields, as `describe` has them."""
    kind = one.rule.WhichOneof("kind")
    if kind is None:
        return ABSENT
    message = getattr(one.rule, kind)
    fields = MessageToDict(message)
    for field in message.DESCRIPTOR.fields:
        if field.enum_type is not None and field.json_name in fields:
            fields[field.json_name] = word(message, field.name)
    texts = {name: one if isinstance(one, str) else json.dumps(one) for name, one in fields.items()}
    return f"{kind}: " + ", ".join(f"{name}={one}" for name, one in texts.items())


RULES = View[api.EndpointRule](
    "rules",
    (
        Column("NAME", lambda one: short(one.name)),
        Column("STATE", lambda one: "DISABLED" if one.rule.disabled else "ENABLED"),
        Column("PRIORITY", lambda one: str(one.rule.priority)),
        Column("SIGNAL", lambda one: text(one.rule.signal), spare=True),
        Column("COOLDOWN", lambda one: duration(one.rule, "cooldown"), spare=True),
        Column("MIN", lambda one: number(one.rule, "min_replicas"), spare=True),
        Column("MAX", lambda one: number(one.rule, "max_replicas"), spare=True),
        Column("CHANGED", lambda one: duration(one, "since_change"), moving=True, spare=True),
        Column("DOES", _does),
    ),
)


DEFAULT_TICK = 15.0
"""Seconds between evaluations of an endpoint, by default."""


def endpoint_lines(endpoint: api.Endpoint) -> list[str]:
    """The state of an endpoint, with its capability sets."""
    status, spec = endpoint.status, endpoint.spec
    weight = f" ({status.granted_capacity:g} by weight)" if status.HasField("granted_capacity") else ""
    granted = f"{status.granted_replicas} granted{weight}"
    counts = f"{status.desired_replicas} desired, {granted}, {status.ready_replicas} ready"
    more = (f"; tenant {endpoint.tenant}" if endpoint.tenant else "") + (", PAUSED" if spec.paused else "")
    line = f"{endpoint.name}: {counts}; bounds {spec.min_replicas}-{spec.max_replicas}{more}"
    sets = [
        f"  {one.id}: {one.desired_replicas} desired, {one.granted_replicas} granted, {one.ready_replicas} ready"
        f" with {counted(one.ready_workers, 'worker')}; each {capabilities(asked.capabilities)}"
        for one, asked in zip(status.capability_sets, spec.capability_sets, strict=True)
    ]
    return [line, *sets, *filter(None, (status.summary,))]


def decision_lines(decision: api.Decision) -> list[str]:
    """A decision: the counts, what limited them, its observations and steps."""
    repeated = (
        f", {decision.count} times since {since(decision, 'create_time')} ago" if decision.count > 1 else ""
    )
    first, last = (local_text(to_datetime(one)) for one in (decision.create_time, decision.last_time))
    taken = first if first == last else f"{first} to {last}"
    return [
        f"{decision.name}, {since(decision, 'last_time')} ago{repeated}, at {taken}",
        f"  {decision.before} -> {decision.wanted} wanted, {decision.granted} granted"
        + (f", limited by {word(decision, 'limited_by')}" if decision.limited_by else "")
        + (f": {decision.summary}" if decision.summary else ""),
        *step_lines(decision),
    ]


def step_lines(decision: api.Decision) -> list[str]:
    """The observations of a decision, and how each step changed the count."""
    lines: list[str] = []
    for seen in decision.observations:
        age = duration(seen, "age")
        words = f"{seen.signal} = {number(seen, 'value')} {word(seen, 'status')}"
        words += (f", {age} old" if age != "-" else "") + (f" ({seen.detail})" if seen.detail else "")
        lines.append(f"    saw   {words}")
        others = (f"{workers(one)} started by someone else" for one in seen.tasks.unmanaged_workers)
        lines += [f"            {one}" for one in (*map(demand, seen.tasks.demands), *others)]
    for step in decision.steps:
        stage = f"{word(step, 'stage').lower()} {step.capability_set or step.rule}".rstrip()
        lines.append(
            f"    {stage:<16} {step.before} -> {step.after}   {word(step, 'code'):<16} {step.text}".rstrip()
        )
    return lines


def evaluation_lines(found: api.EvaluateResponse) -> list[str]:
    """An evaluation: the count and its reasons, alternatives, and the next change."""
    decision = found.decision
    limited = f", limited by {word(decision, 'limited_by')}" if decision.limited_by else ""
    lines = [
        f"{decision.before} -> {decision.wanted} wanted{limited}: {decision.summary}",
        *step_lines(decision),
    ]
    lines += [f"  would be {one.wanted} if {one.text}" for one in found.alternatives]
    if found.HasField("next_change"):
        wait = format_duration(seconds(found.next_change.wait))
        lines.append(f"  may go to {found.next_change.wanted} in {wait} if signals do not change")
    elif not found.alternatives:
        lines.append(f"  stays at {decision.wanted} while signals do not change")
    return lines


def outlook_lines(
    endpoint: api.Endpoint, found: api.EvaluateResponse, latest: Sequence[api.Decision]
) -> list[str]:
    """What would change the count of an endpoint, and when it may change next, also by its latest decision."""
    seen = found.decision.observations
    absent = [one.signal for one in seen if one.status != api.Observation.STATUS_OK]
    known = [one.signal for one in seen if one.status == api.Observation.STATUS_OK]
    lines = ["what would change it:"]
    lines += [f"  it would be {one.wanted} if {one.text}" for one in found.alternatives]
    if absent:
        lines.append(f"  {', '.join(absent)}: rules that need it hold until it is available again")
    if known and not endpoint.spec.paused:
        lines.append(f"  other values of {', '.join(known)}, as its rules say")
    if len(lines) == 1:
        lines.append("  you: gpuscalectl scale endpoint, or another spec")
    if found.HasField("next_change"):
        wait = format_duration(seconds(found.next_change.wait))
        when = f"to {found.next_change.wanted} in {wait} if signals do not change"
    else:
        tick = seconds(endpoint.spec.tick) or DEFAULT_TICK
        when = f"when signals do: they are read every {format_duration(tick)}"
    # `replicas failed (why): the next one starts in 8.0 s`
    backing_off = [
        f"what failed is tried again: {step.text.rpartition(': ')[2]}, as of {since(one, 'last_time')} ago"
        for one in latest
        for step in one.steps
        if step.code == api.DecisionCode.DECISION_CODE_BACK_OFF
    ]
    return [*lines, f"when it may change next: {when}", *backing_off]


PRESETS = View[api.Preset](
    "presets",
    (
        Column("NAME", lambda preset: short(preset.name)),
        Column("WHAT", lambda preset: preset.summary),
        Column("PARAMETERS", lambda preset: text(",".join(sorted(preset.parameters))), wide=True),
    ),
)


BACKTESTS = View[api.Backtest](
    "backtests",
    (
        Column("NAME", lambda one: short(one.name)),
        Column("STATE", lambda one: word(one, "state")),
        Column("DONE", lambda one: f"{one.done_count}/{len(one.spec.policies)}"),
        Column("REQUESTS", lambda one: str(one.request_count)),
        Column("BY", lambda one: text(one.creator)),
        Column("AGE", lambda one: since(one, "create_time"), moving=True),
        Column("WHY", lambda one: text(one.message)),
    ),
)


def reports(work: float) -> View[api.BacktestReport]:
    """The view of backtests; `work` is the GPU hours of the work alone."""
    return View(
        "reports",
        (
            Column("POLICY", lambda one: one.name),
            Column("LATE", lambda one: f"{one.violation_percent:.2f}%"),
            Column("GPU-HOURS", lambda one: f"{one.gpu_hours:.2f}"),
            Column("X-WORK", lambda one: f"{one.gpu_hours / work:.2f}" if work else "-"),
            Column("P50", lambda one: _wait(one.wait_p50_seconds)),
            Column("P95", lambda one: _wait(one.wait_p95_seconds)),
            Column("P99", lambda one: _wait(one.wait_p99_seconds)),
            Column("FLAPS", lambda one: str(one.flap_count), spare=True),
            Column("CHANGES", lambda one: str(one.change_count), spare=True),
            Column("MOST", lambda one: str(one.most_replicas), spare=True),
            Column("PENDING-HOURS", lambda one: f"{one.pending_replica_hours:.2f}", spare=True),
            Column("BACKLOG-HOURS", lambda one: f"{one.backlog_hours:.2f}", wide=True),
            Column("UNSERVED", lambda one: str(one.unserved_count), wide=True),
            Column("KILLED", lambda one: str(one.killed_count), wide=True),
            Column("WASTED-STARTS", lambda one: str(one.wasted_start_count), wide=True),
        ),
    )


def tuning(trials: Mapping[str, Trial], chosen: str, work: float) -> View[api.BacktestReport]:
    """The view of policies to choose from; what is chosen has a star."""
    _, late, *others = reports(work).columns
    return View(
        "tuning",
        (
            Column("POLICY", lambda one: f"{'*' if one.name == chosen else ' '} {one.name}"),
            late,
            Column("AT-MOST", lambda one: f"{trials[one.name].most_late:.2f}%"),
            *(replace(one, spare=one.heading != "GPU-HOURS") for one in others),
        ),
    )


def report_lines(output: Output, found: api.BacktestResponse) -> list[str]:
    """A table of all policies, and the GPU hours of the work alone."""
    return [*output.table(found.reports, reports(found.work_gpu_hours)), work_line(found)]


def work_line(found: api.BacktestResponse) -> str:
    """The GPU hours of the work alone."""
    return f"work alone: {found.work_gpu_hours:.2f} GPU hours; no policy can need less"


def _wait(value: float) -> str:
    return f"{value:.1f}s" if value < 100 else format_duration(value)
