"""Status, decisions, and what evaluations go by, between the model and the wire.

Inputs are exact to the bit, so that a decision can be made again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from gpuscale.api.autoscaler import v1 as api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.autoscaler.domain.decisions import Decision, Evaluation, SetCount, Step
from gpuscale.autoscaler.domain.engine import Memory, Question
from gpuscale.autoscaler.domain.inputs import (
    Aggregation,
    Burst,
    Inputs,
    InputSeries,
    Observation,
    ObservationStatus,
    SetState,
)
from gpuscale.autoscaler.domain.replicas import Replica, ReplicaState, shown_state
from gpuscale.autoscaler.domain.signals import Shown
from gpuscale.autoscaler.domain.spec import Endpoint, EndpointSpec
from gpuscale.autoscaler.domain.whatif import ALWAYS, Answer, Stated, StatedSignal
from gpuscale.autoscaler.wire.specs import (
    group_to_wire,
    groups_from_wire,
    set_state_from_wire,
    set_state_to_wire,
    spec_from_wire,
    spec_to_wire,
    tasks_from_wire,
    tasks_to_wire,
)
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.names import adapter_name, endpoint_name, replica_name
from gpuscale.common.wire import optional_seconds, seconds, to_datetime, to_duration, to_timestamp


@dataclass(frozen=True, slots=True)
class EndpointView:
    """An endpoint with what its status is told from.

    Attributes:
        endpoint: as stored.
        replicas: its replicas that have not ended.
        silent: ids of adapters that are not heard of.
        latest: name of the decision that speaks for the present; empty before the first.
        summary: that decision in one line.
    """

    endpoint: Endpoint
    replicas: Sequence[Replica] = ()
    silent: Collection[str] = ()
    latest: str = ""
    summary: str = ""


def endpoint_to_wire(view: EndpointView) -> autoscaler_api.Endpoint:
    """The message of an endpoint with its status."""
    one = view.endpoint
    return autoscaler_api.Endpoint(
        name=endpoint_name(one.id),
        spec=spec_to_wire(one.spec),
        status=_status(view),
        etag=one.etag,
        create_time=to_timestamp(one.create_time),
        update_time=to_timestamp(one.update_time),
        tenant=one.tenant,
    )


def _status(view: EndpointView) -> autoscaler_api.EndpointStatus:
    shown = [shown_state(replica, replica.adapter in view.silent) for replica in view.replicas]
    unknown = shown.count(ReplicaState.UNKNOWN)
    summary = view.summary or "not evaluated yet"
    if view.endpoint.deleting:
        summary = f"deleted once its {len(view.replicas)} replicas have finished and stopped"
    if unknown:
        summary += f" ({unknown} replicas have not been heard of)"
    return autoscaler_api.EndpointStatus(
        desired_replicas=view.endpoint.desired,
        granted_replicas=sum(replica.granted for replica in view.replicas),
        starting_replicas=shown.count(ReplicaState.PENDING) + shown.count(ReplicaState.STARTING),
        ready_replicas=shown.count(ReplicaState.READY),
        draining_replicas=shown.count(ReplicaState.DRAINING),
        latest_decision=view.latest,
        summary=summary,
        capability_sets=[_set_status(view, one.id) for one in view.endpoint.spec.capability_sets],
    )


def _set_status(view: EndpointView, set_id: str) -> autoscaler_api.CapabilitySetStatus:
    own = [replica for replica in view.replicas if replica.group.set == set_id]
    ready = [one for one in own if shown_state(one, one.adapter in view.silent) is ReplicaState.READY]
    return autoscaler_api.CapabilitySetStatus(
        id=set_id,
        desired_replicas=view.endpoint.targets[set_id],
        granted_replicas=sum(one.granted for one in own),
        ready_replicas=len(ready),
        ready_workers=sum(one.group.actual.workers for one in ready),
    )


def replica_to_wire(replica: Replica, *, silent: bool) -> autoscaler_api.Replica:
    """The message of a replica, UNKNOWN where its adapter is silent."""
    state = shown_state(replica, silent)
    wire = autoscaler_api.Replica(
        name=replica_name(replica.endpoint, replica.id),
        state=autoscaler_api.Replica.State.Value(f"STATE_{state.value}"),
        adapter=adapter_name(replica.adapter) if replica.adapter else "",
        node=replica.node,
        pid=replica.pid,
        exit_code=replica.exit_code,
        reason=replica.reason,
        create_time=to_timestamp(replica.create_time),
        end_time=None if replica.end_time is None else to_timestamp(replica.end_time),
    )
    if replica.group.set:
        wire.capability_set = replica.group.set
        wire.workers.CopyFrom(group_to_wire(replica.group.actual))
    if state is ReplicaState.UNKNOWN:
        wire.reason = "its adapter has not been heard of"
    if replica.lease is not None:
        wire.reservation = replica.lease.reservation
        wire.gpu_uuids.extend(replica.lease.gpu_uuids)
    return wire


def decision_body(decision: Decision) -> autoscaler_api.Decision:
    """The message of a decision, but for its name, its times and its count."""
    return autoscaler_api.Decision(
        observations=[observation_to_wire(one) for one in decision.observations],
        steps=[_step(one) for one in decision.steps],
        before=decision.before,
        wanted=decision.wanted,
        granted=decision.granted,
        limited_by=decision.limited_by or "",
        capability_sets=_set_counts(decision.sets),
        summary=decision.summary,
        etag=decision.etag,
    )


def evaluation_to_wire(evaluation: Evaluation) -> autoscaler_api.Decision:
    """The part of a decision that is evaluated: without what was done about it."""
    return autoscaler_api.Decision(
        observations=[observation_to_wire(one) for one in evaluation.observations],
        steps=[_step(one) for one in evaluation.steps],
        before=evaluation.before,
        wanted=evaluation.wanted,
        limited_by=evaluation.limited_by or "",
        capability_sets=_set_counts(evaluation.sets),
    )


def _set_counts(sets: Mapping[str, SetCount]) -> list[autoscaler_api.CapabilitySetCount]:
    return [
        autoscaler_api.CapabilitySetCount(id=one, before=count.before, wanted=count.wanted)
        for one, count in sets.items()
    ]


def observation_to_wire(one: Observation) -> autoscaler_api.Observation:
    """The message of an observation."""
    return autoscaler_api.Observation(
        signal=one.signal,
        value=one.value,
        age=None if one.age is None else to_duration(one.age),
        status=autoscaler_api.Observation.Status.Value(f"STATUS_{one.status.value}"),
        detail=one.detail,
        tasks=None if one.tasks is None else tasks_to_wire(one.tasks),
    )


def sample_to_wire(one: Shown) -> autoscaler_api.SignalSample:
    """The message of what a signal showed at evaluations in a row."""
    return autoscaler_api.SignalSample(
        start_time=to_timestamp(datetime.fromtimestamp(one.first, UTC)),
        end_time=to_timestamp(datetime.fromtimestamp(one.last, UTC)),
        value=one.value,
        status=autoscaler_api.Observation.Status.Value(f"STATUS_{one.status.value}"),
    )


def _step(one: Step) -> autoscaler_api.DecisionStep:
    return autoscaler_api.DecisionStep(
        stage=autoscaler_api.DecisionStep.Stage.Value(f"STAGE_{one.stage.name}"),
        rule=one.rule,
        before=one.before,
        after=one.after,
        code=one.code,
        text=one.text,
        capability_set=one.capability_set,
    )


_STATUSES = {api.Observation.Status.Value(f"STATUS_{one.value}"): one for one in ObservationStatus}
_AGGREGATIONS = {api.Aggregation.Value(f"AGGREGATION_{one.name}"): one for one in Aggregation}
_Signal = api.DecisionInputs.Signal
_Count = api.DecisionInputs.Count


def question_to_wire(question: Question) -> api.DecisionInputs:
    """The message of all that an evaluation goes by."""
    inputs, memory = question.inputs, question.memory
    unseen = [name for name in inputs.series if name not in inputs.observations]
    return api.DecisionInputs(
        spec=spec_to_wire(question.spec),
        before=inputs.before,
        ready_replicas=inputs.ready,
        unknown_replicas=question.unknown_replicas,
        now=inputs.now,
        time=to_timestamp(inputs.wall),
        startup=inputs.startup,
        signals=[
            *(_signal_to_wire(one, inputs.history(name)) for name, one in inputs.observations.items()),
            *(_past_to_wire(name, inputs.history(name)) for name in unseen),
        ],
        rule_changes=[
            api.DecisionInputs.RuleChange(rule=rule, at=at) for rule, at in inputs.last_changes.items()
        ],
        bursts=[
            api.DecisionInputs.Burst(rule=rule, over_at=one.over_at, peak=one.peak)
            for rule, one in inputs.bursts.items()
        ],
        since=memory.since,
        asked=_counts_to_wire(memory.asked),
        changes=_counts_to_wire(memory.changes),
        gpu_limit=inputs.gpu_limit,
        capability_sets=[set_state_to_wire(name, one) for name, one in inputs.sets.items()],
    )


def question_from_wire(wire: api.DecisionInputs) -> Question:
    """All that an evaluation went by."""
    inputs = Inputs(
        before=wire.before,
        ready=wire.ready_replicas,
        now=wire.now,
        wall=to_datetime(wire.time),
        observations={one.observation.signal: _observation(one) for one in wire.signals if not one.absent},
        series={
            one.observation.signal: InputSeries(tuple(one.times), tuple(one.values)) for one in wire.signals
        },
        last_changes={one.rule: one.at for one in wire.rule_changes},
        bursts={one.rule: Burst(one.over_at, one.peak) for one in wire.bursts},
        startup=wire.startup if wire.HasField("startup") else None,
        gpu_limit=wire.gpu_limit if wire.HasField("gpu_limit") else None,
        sets={one.id: set_state_from_wire(one) for one in wire.capability_sets},
    )
    memory = Memory(wire.since, _counts(wire.asked), _counts(wire.changes))
    return Question(spec_from_wire(wire.spec, "spec"), inputs, memory, wire.unknown_replicas)


def _signal_to_wire(one: Observation, past: InputSeries) -> _Signal:
    return _Signal(
        observation=observation_to_wire(one),
        value=one.value,
        age=one.age,
        proven_empty=one.proven_empty,
        ignored=one.ignored,
        silent_count=one.silent_count,
        told_count=one.told_count,
        across=api.Aggregation.Value(f"AGGREGATION_{one.across.name}"),
        times=past.times,
        values=past.values,
    )


def _past_to_wire(name: str, past: InputSeries) -> _Signal:
    known = api.Observation(signal=name)
    return _Signal(observation=known, times=past.times, values=past.values, absent=True)


def _observation(wire: _Signal) -> Observation:
    return Observation(
        signal=wire.observation.signal,
        status=_STATUSES[wire.observation.status],
        value=wire.value if wire.HasField("value") else None,
        age=wire.age if wire.HasField("age") else None,
        detail=wire.observation.detail,
        proven_empty=wire.proven_empty,
        ignored=wire.ignored,
        silent_count=wire.silent_count,
        told_count=wire.told_count,
        across=_AGGREGATIONS[wire.across],
        tasks=tasks_from_wire(wire.observation.tasks, "tasks")
        if wire.observation.HasField("tasks")
        else None,
    )


def _counts_to_wire(counts: Iterable[tuple[float, int]]) -> list[_Count]:
    return [_Count(at=at, replicas=count) for at, count in counts]


def _counts(wire: Iterable[_Count]) -> tuple[tuple[float, int], ...]:
    return tuple((one.at, one.replicas) for one in wire)


_STATED_STATUSES = {api.Observation.Status.Value(f"STATUS_{one.value}"): one for one in ObservationStatus}


def stated_from_wire(wire: api.EvaluateRequest, spec: EndpointSpec, now: float) -> Stated:
    """What a request states about an evaluation of `spec` at `now`.

    Raises:
        InvalidArgumentError: it speaks of a signal or rule that the spec has not, or of one twice.
    """
    signals: dict[str, StatedSignal] = {}
    known = {one.id for one in spec.signals}
    for index, one in enumerate(wire.signals):
        _require(one.signal, known - signals.keys(), f"signals[{index}].signal", "signal")
        signals[one.signal] = _stated_signal(one, f"signals[{index}]")
    past = wire.past if wire.HasField("past") else None
    return Stated(
        signals,
        wire.before if wire.HasField("before") else None,
        wire.ready_replicas if wire.HasField("ready_replicas") else None,
        wire.unknown_replicas if wire.HasField("unknown_replicas") else None,
        None if past is None else _memory(past, now),
        None if past is None else _rule_changes(past, spec, now),
        optional_seconds(wire, "startup"),
        to_datetime(wire.time) if wire.HasField("time") else None,
        wire.gpu_limit if wire.HasField("gpu_limit") else None,
        _sets(wire, spec),
    )


def _sets(wire: api.EvaluateRequest, spec: EndpointSpec) -> dict[str, SetState]:
    found: dict[str, SetState] = {}
    known = {one.id for one in spec.capability_sets}
    for index, one in enumerate(wire.capability_sets):
        field = f"capability_sets[{index}]"
        _require(one.id, known - found.keys(), f"{field}.id", "capability set")
        found[one.id] = SetState(one.before, groups_from_wire(one.groups, f"{field}.groups"))
    return found


def response_to_wire(found: Answer, decision: api.Decision) -> api.EvaluateResponse:
    """The message of an answer; `decision` is its evaluation as it would be stored."""
    evaluation, following = found.result.evaluation, found.next_change
    return api.EvaluateResponse(
        decision=decision,
        asked=evaluation.wanted if evaluation.asked is None else evaluation.asked,
        effective_rules=sorted(evaluation.effective),
        alternatives=[
            api.Alternative(code=one.code, text=one.text, wanted=one.wanted) for one in found.alternatives
        ],
        next_change=None
        if following is None
        else api.NextChange(wait=to_duration(following.wait), wanted=following.wanted),
    )


def _stated_signal(wire: api.StatedSignal, path: str) -> StatedSignal:
    tasks = tasks_from_wire(wire.tasks, f"{path}.tasks") if wire.HasField("tasks") else None
    value = wire.value if wire.HasField("value") else None
    return StatedSignal(
        value if tasks is None else float(tasks.total),
        seconds(wire.age),
        _STATED_STATUSES.get(wire.status, ObservationStatus.OK),
        tuple((seconds(point.age), point.value) for point in wire.points),
        wire.silent_count,
        wire.proven_empty if wire.HasField("proven_empty") else None,
        tasks,
    )


def _memory(past: api.StatedPast, now: float) -> Memory:
    """What is remembered of the counts, oldest first."""
    since = optional_seconds(past, "since")
    return Memory(
        ALWAYS.since if since is None else now - since,
        tuple(sorted((now - seconds(one.age), one.replicas) for one in past.asked)),
        tuple(sorted((now - seconds(one.age), one.replicas) for one in past.changes)),
    )


def _rule_changes(past: api.StatedPast, spec: EndpointSpec, now: float) -> dict[str, float]:
    found: dict[str, float] = {}
    known = {one.id for one in spec.rules}
    for index, one in enumerate(past.rule_changes):
        _require(one.rule, known - found.keys(), f"past.rule_changes[{index}].rule", "rule")
        found[one.rule] = now - seconds(one.age)
    return found


def _require(name: str, known: Collection[str], field: str, what: str) -> None:
    if name not in known:
        text = f"must be the id of a {what} of the spec, once; left: {', '.join(sorted(known)) or 'none'}"
        raise InvalidArgumentError(f"{field} {text}", field=field)
