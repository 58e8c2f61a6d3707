"""What is stated of an evaluation, and what it comes to, between the wire and the model."""

from collections.abc import Collection

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain.model import EndpointSpec, ObservationStatus, SetState
from gpuscale.autoscaler.domain.pace import Memory
from gpuscale.autoscaler.domain.stating import ALWAYS, Stated, StatedSignal
from gpuscale.autoscaler.domain.whatif import Answer
from gpuscale.autoscaler.wire.translate_capabilities import groups_from_wire, tasks_from_wire
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.wire import optional_seconds, seconds, to_datetime, to_duration

_STATUSES = {api.Observation.Status.Value(f"STATUS_{one.value}"): one for one in ObservationStatus}


def stated_from_wire(wire: api.EvaluateRequest, spec: EndpointSpec, now: float) -> Stated:
    """What a request states about an evaluation of `spec` at `now`.

    Raises:
        InvalidArgumentError: it speaks of a signal or rule that the spec has not, or of one twice.
    """
    signals: dict[str, StatedSignal] = {}
    known = {one.id for one in spec.signals}
    for index, one in enumerate(wire.signals):
        _require(one.signal, known - signals.keys(), f"signals[{index}].signal", "signal")
        signals[one.signal] = _signal(one, f"signals[{index}]")
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


def _signal(wire: api.StatedSignal, path: str) -> StatedSignal:
    tasks = tasks_from_wire(wire.tasks, f"{path}.tasks") if wire.HasField("tasks") else None
    value = wire.value if wire.HasField("value") else None
    return StatedSignal(
        value if tasks is None else float(tasks.total),
        seconds(wire.age),
        _STATUSES.get(wire.status, ObservationStatus.OK),
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
