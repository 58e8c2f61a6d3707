"""What has become of endpoints, as messages: status, replicas and decisions."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.autoscaler.domain.model import Decision, Endpoint, Evaluation, Observation, SetCount, Step
from gpuscale.autoscaler.domain.remembered import Shown
from gpuscale.autoscaler.domain.replicas import Replica, ReplicaState, shown_state
from gpuscale.autoscaler.wire.translate import spec_to_wire
from gpuscale.autoscaler.wire.translate_capabilities import group_to_wire, tasks_to_wire
from gpuscale.common.names import adapter_name, endpoint_name, replica_name
from gpuscale.common.wire import to_duration, to_timestamp


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
