"""Status, decisions, and inputs of evaluations, between the model and the wire.

Inputs are bit-exact, so that a decision can be reproduced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TypeVar

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain.decisions import Code, Decision, Evaluation
from gpuscale.autoscaler.domain.engine import Memory, Question
from gpuscale.autoscaler.domain.inputs import (
    Aggregation,
    Burst,
    GiveWay,
    Inputs,
    InputSeries,
    Learnt,
    Observation,
    ObservationStatus,
    ReplicaWeights,
    SetState,
    TaskReport,
)
from gpuscale.autoscaler.domain.replicas import Replica, ReplicaState, shown_state
from gpuscale.autoscaler.domain.rules.rule import Rule
from gpuscale.autoscaler.domain.signals import Shown
from gpuscale.autoscaler.domain.spec import CapabilitySet, Endpoint, EndpointSpec, Signal
from gpuscale.autoscaler.domain.whatif import ALWAYS, Answer, Stated, StatedSignal
from gpuscale.autoscaler.wire.specs import (
    CODEC,
    from_wire,
    set_state_from_wire,
    set_state_to_wire,
    spec_from_wire,
    spec_to_wire,
    to_wire,
)
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.names import adapter_name, endpoint_name, node_name, replica_name
from gpuscale.common.sizes import counted
from gpuscale.common.wire import (
    optional_seconds,
    optional_timestamp,
    seconds,
    to_datetime,
    to_duration,
    to_timestamp,
)
from gpuscale.internal.autoscaler import v1 as autoscaler_internal

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class EndpointView:
    """An endpoint with what its status needs."""

    endpoint: Endpoint  # as stored
    replicas: Sequence[Replica] = ()  # its replicas that have not ended
    silent: Collection[str] = ()  # ids of silent adapters
    latest: str = ""  # name of the current decision; empty before the first
    summary: str = ""  # that decision in one line


def endpoint_to_wire(view: EndpointView) -> api.Endpoint:
    """The message of an endpoint with its status."""
    one = view.endpoint
    shown = [(replica, shown_state(replica, replica.adapter in view.silent)) for replica in view.replicas]
    count = Counter(state for _, state in shown)
    summary = view.summary or "not evaluated yet"
    if one.deleting:
        summary = f"deleted once its {counted(len(view.replicas), 'replica has', 'replicas have')} finished and stopped"
    if unknown := count[ReplicaState.UNKNOWN]:
        summary += f" ({counted(unknown, 'replica has', 'replicas have')} not been heard of)"
    if starts := [each.reason for each, state in shown if state is ReplicaState.STARTING and each.reason]:
        summary += f" ({counted(len(starts), 'replica starts', 'replicas start')}: {starts[0]})"
    sets: list[api.CapabilitySetStatus] = []
    for name in (each.id for each in one.spec.capability_sets):
        members = [pair for pair in shown if pair[0].group.set == name]
        ready = [replica for replica, state in members if state is ReplicaState.READY]
        sets.append(
            api.CapabilitySetStatus(
                id=name,
                desired_replicas=one.targets[name],
                granted_replicas=sum(replica.granted for replica, _ in members),
                ready_replicas=len(ready),
                ready_workers=sum(replica.group.actual.workers for replica in ready),
            )
        )
    template, granted = one.spec.template, [replica for replica in view.replicas if replica.granted]
    weights = (template.weight(replica.template) for replica in granted)
    return api.Endpoint(
        name=endpoint_name(one.id),
        spec=spec_to_wire(one.spec),
        status=api.EndpointStatus(
            desired_replicas=one.desired,
            granted_replicas=len(granted),
            granted_capacity=sum(weights) if template.models else None,
            starting_replicas=count[ReplicaState.PENDING] + count[ReplicaState.STARTING],
            ready_replicas=count[ReplicaState.READY],
            draining_replicas=count[ReplicaState.DRAINING],
            latest_decision=view.latest,
            summary=summary,
            capability_sets=sets,
        ),
        etag=one.etag,
        create_time=to_timestamp(one.create_time),
        update_time=to_timestamp(one.update_time),
        tenant=one.tenant,
        creator=one.creator,
        state=api.Endpoint.STATE_DELETING if one.deleting else api.Endpoint.STATE_ACTIVE,
        delete_time=optional_timestamp(one.delete_time),
    )


def replica_to_wire(replica: Replica, *, silent: bool) -> api.Replica:
    """The message of a replica, UNKNOWN if its adapter is silent."""
    state = shown_state(replica, silent)
    wire = api.Replica(
        name=replica_name(replica.endpoint, replica.id),
        state=api.Replica.State.Value(f"STATE_{state.value}"),
        adapter=adapter_name(replica.adapter) if replica.adapter else "",
        node=node_name(replica.node) if replica.node else "",
        pid=replica.pid,
        exit_code=replica.exit_code,
        reason=replica.reason,
        create_time=to_timestamp(replica.create_time),
        end_time=optional_timestamp(replica.end_time),
    )
    if replica.end_reason is not None:
        wire.end_reason = api.Replica.EndReason.Value(f"END_REASON_{replica.end_reason.value}")
    if replica.group.set:
        wire.capability_set = replica.group.set
        to_wire(wire.workers, replica.group.actual).SetInParent()
    if state is ReplicaState.UNKNOWN:
        wire.reason = "its adapter has not been heard of"
    if replica.revocation is not None and not replica.ended:
        wire.revoke_time.CopyFrom(to_timestamp(replica.revocation.time))
        wire.reason = wire.reason or replica.revocation.reason
    if replica.lease is not None:
        wire.reservation = replica.lease.reservation
        wire.gpu_uuids.extend(replica.lease.gpu_uuids)
        if len(replica.template.models) == 1:
            to_wire(wire.model, replica.template.models[0])
    return wire


def decision_body(decision: Decision) -> api.Decision:
    """The message of a decision, without its name, times and count."""
    wire = evaluation_to_wire(decision)
    wire.granted, wire.summary, wire.etag = decision.granted, decision.summary, decision.etag
    return wire


def evaluation_to_wire(one: Evaluation | Decision) -> api.Decision:
    """The evaluated part of a decision: without what was done about it."""
    return api.Decision(
        observations=map(observation_to_wire, one.observations),
        steps=[to_wire(api.DecisionStep(), step) for step in one.steps],
        before=one.before,
        wanted=one.wanted,
        limited_by=_CODES[one.limited_by],
        capability_sets=[
            api.CapabilitySetCount(id=name, before=count.before, wanted=count.wanted)
            for name, count in one.sets.items()
        ],
    )


def observation_to_wire(one: Observation) -> api.Observation:
    """The message of an observation."""
    return api.Observation(
        signal=one.signal,
        value=one.value,
        age=None if one.age is None else to_duration(one.age),
        status=api.Observation.Status.Value(f"STATUS_{one.status.value}"),
        detail=one.detail,
        tasks=None if one.tasks is None else to_wire(api.TaskReport(), one.tasks),
    )


def sample_to_wire(one: Shown) -> api.SignalSample:
    """The message of equal consecutive samples of a signal."""
    return api.SignalSample(
        start_time=to_timestamp(datetime.fromtimestamp(one.first, UTC)),
        end_time=to_timestamp(datetime.fromtimestamp(one.last, UTC)),
        value=one.value,
        status=api.Observation.Status.Value(f"STATUS_{one.status.value}"),
    )


_CODES: Mapping[Code | None, api.DecisionCode.ValueType] = {
    None: api.DecisionCode.Value("DECISION_CODE_UNSPECIFIED"),
    **{one: api.DecisionCode.Value(f"DECISION_CODE_{one}") for one in Code},
}


_STATUSES = {api.Observation.Status.Value(f"STATUS_{one.value}"): one for one in ObservationStatus}
_AGGREGATIONS = {api.Aggregation.Value(f"AGGREGATION_{one.name}"): one for one in Aggregation}
_EXACT = ("value", "age", "proven_empty", "ignored", "silent_count", "told_count")
"""What inputs hold of an observation to the bit."""
_Signal = autoscaler_internal.DecisionInputs.Signal
_Count = autoscaler_internal.DecisionInputs.Count
_GiveWay = autoscaler_internal.DecisionInputs.GiveWay
_Capacity = autoscaler_internal.DecisionInputs.Capacity


def question_to_wire(question: Question) -> autoscaler_internal.DecisionInputs:
    """The message of all inputs of an evaluation."""
    inputs, memory, own = question.inputs, question.memory, question.inputs.capacity
    signals = [
        _Signal(
            observation=observation_to_wire(one),
            across=api.Aggregation.Value(f"AGGREGATION_{one.across.name}"),
            times=past.times,
            values=past.values,
            **{field: getattr(one, field) for field in _EXACT},
        )
        for name, one in inputs.observations.items()
        for past in [inputs.history(name)]
    ]
    for name in (one for one in inputs.series if one not in inputs.observations):
        known, past = api.Observation(signal=name), inputs.history(name)
        signals.append(_Signal(observation=known, times=past.times, values=past.values, absent=True))
    return autoscaler_internal.DecisionInputs(
        spec=spec_to_wire(question.spec),
        before=inputs.before,
        ready_replicas=inputs.ready,
        unknown_replicas=question.unknown_replicas,
        now=inputs.now,
        time=to_timestamp(inputs.wall),
        startup=inputs.startup,
        signals=signals,
        rule_changes=[
            autoscaler_internal.DecisionInputs.RuleChange(rule=rule, at=at)
            for rule, at in inputs.last_changes.items()
        ],
        bursts=[
            autoscaler_internal.DecisionInputs.Burst(rule=rule, over_at=one.over_at, peak=one.peak)
            for rule, one in inputs.bursts.items()
            if isinstance(one, Burst)
        ],
        learnt={
            rule: to_wire(autoscaler_internal.DecisionInputs.Learnt(), one)
            for rule, one in inputs.bursts.items()
            if isinstance(one, Learnt)
        },
        since=memory.since,
        asked=_counts_to_wire(memory.asked),
        changes=_counts_to_wire(memory.changes),
        gpu_limit=inputs.gpu_limit,
        capability_sets=[set_state_to_wire(name, one) for name, one in inputs.sets.items()],
        gives_way=None if inputs.gives_way is None else to_wire(_GiveWay(), inputs.gives_way),
        capacity=_Capacity(weights=own.weights, next=own.next, speed=own.speed) if own else None,
    )


def question_from_wire(wire: autoscaler_internal.DecisionInputs) -> Question:
    """All inputs of an evaluation."""
    inputs = Inputs(
        before=wire.before,
        ready=wire.ready_replicas,
        now=wire.now,
        wall=to_datetime(wire.time),
        observations={
            one.observation.signal: Observation(
                signal=one.observation.signal,
                status=_STATUSES[one.observation.status],
                detail=one.observation.detail,
                across=_AGGREGATIONS[one.across],
                tasks=from_wire(TaskReport, one.observation.tasks, "tasks")
                if one.observation.HasField("tasks")
                else None,
                **{field.name: held for field, held in one.ListFields() if field.name in _EXACT},
            )
            for one in wire.signals
            if not one.absent
        },
        series={
            one.observation.signal: InputSeries(tuple(one.times), tuple(one.values)) for one in wire.signals
        },
        last_changes={one.rule: one.at for one in wire.rule_changes},
        bursts={one.rule: Burst(one.over_at, one.peak) for one in wire.bursts}
        | {rule: from_wire(Learnt, one, "learnt") for rule, one in wire.learnt.items()},
        startup=wire.startup if wire.HasField("startup") else None,
        gpu_limit=wire.gpu_limit if wire.HasField("gpu_limit") else None,
        sets={one.id: set_state_from_wire(one) for one in wire.capability_sets},
        gives_way=from_wire(GiveWay, wire.gives_way, "gives_way") if wire.HasField("gives_way") else None,
        capacity=from_wire(ReplicaWeights, wire.capacity, "capacity") if wire.HasField("capacity") else None,
    )
    memory = Memory(wire.since, _counts(wire.asked), _counts(wire.changes))
    return Question(spec_from_wire(wire.spec, "spec"), inputs, memory, wire.unknown_replicas)


def _counts_to_wire(counts: Iterable[tuple[float, int]]) -> list[_Count]:
    return [_Count(at=at, replicas=count) for at, count in counts]


def _counts(wire: Iterable[_Count]) -> tuple[tuple[float, int], ...]:
    return tuple((one.at, one.replicas) for one in wire)


def stated_from_wire(wire: api.EvaluateRequest, spec: EndpointSpec, now: float) -> Stated:
    """The given values of signals and rules of `spec`, each at most once, for an evaluation at `now`."""
    past, memory = (wire.past, ALWAYS) if wire.HasField("past") else (None, None)
    if past is not None:
        since = optional_seconds(past, "since")
        memory = Memory(
            ALWAYS.since if since is None else now - since,
            tuple(sorted((now - seconds(one.age), one.replicas) for one in past.asked)),
            tuple(sorted((now - seconds(one.age), one.replicas) for one in past.changes)),
        )
    signals = _named(wire.signals, "signal", spec.measured, "signals", "signal")
    stated: dict[str, StatedSignal] = {}
    for name, one, path in signals:
        tasks = from_wire(TaskReport, one.tasks, f"{path}.tasks") if one.HasField("tasks") else None
        value = one.value if one.HasField("value") else None
        stated[name] = StatedSignal(
            value if tasks is None else float(tasks.total),
            seconds(one.age),
            _STATUSES.get(one.status, ObservationStatus.OK),
            tuple((seconds(point.age), point.value) for point in one.points),
            one.silent_count,
            one.proven_empty if one.HasField("proven_empty") else None,
            tasks,
        )
    sets = _named(wire.capability_sets, "id", spec.capability_sets, "capability_sets", "capability set")
    rules = _named(wire.past.rule_changes, "rule", spec.rules, "past.rule_changes", "rule")
    return Stated(
        stated,
        before=wire.before if wire.HasField("before") else None,
        ready=wire.ready_replicas if wire.HasField("ready_replicas") else None,
        unknown=wire.unknown_replicas if wire.HasField("unknown_replicas") else None,
        memory=memory,
        last_changes=None if past is None else {name: now - seconds(one.age) for name, one, _ in rules},
        startup=optional_seconds(wire, "startup"),
        wall=to_datetime(wire.time) if wire.HasField("time") else None,
        gpu_limit=wire.gpu_limit if wire.HasField("gpu_limit") else None,
        sets={
            name: replace(SetState(one.before), **CODEC.stated(SetState, one, path))
            for name, one, path in sets
        },
    )


def _named(
    wire: Sequence[M], field: str, known: Iterable[Signal | CapabilitySet | Rule], path: str, what: str
) -> Iterator[tuple[str, M, str]]:
    """The messages with the part of a spec that each names, at most once, and their paths."""
    left = {one.id for one in known}
    for index, one in enumerate(wire):
        name, where = getattr(one, field), f"{path}[{index}]"
        if name not in left:
            text = f"must be the id of a {what} of the spec, once; left: {', '.join(sorted(left)) or 'none'}"
            raise InvalidArgumentError(f"{where}.{field} {text}", field=f"{where}.{field}")
        left.discard(name)
        yield name, one, where


def response_to_wire(found: Answer, decision: api.Decision) -> api.EvaluateResponse:
    """The message of an answer; `decision` is its evaluation as it would be stored."""
    evaluation, following = found.result.evaluation, found.next_change
    return api.EvaluateResponse(
        decision=decision,
        asked=evaluation.wanted if evaluation.asked is None else evaluation.asked,
        effective_rules=sorted(evaluation.effective),
        alternatives=[to_wire(api.Alternative(), one) for one in found.alternatives],
        next_change=None if following is None else to_wire(api.NextChange(), following),
    )
