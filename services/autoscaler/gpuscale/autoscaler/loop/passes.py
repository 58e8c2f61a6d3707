"""One pass over an endpoint, as one transaction: evaluate, plan, and write down every intent with its decision.

The new count, the cooldowns that it starts, the decision that explains it, and the intents that follow from it are on disk
together or not at all. Only then does anything happen outside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from uuid import uuid4

from gpuscale.autoscaler.domain.decisions import (
    Code,
    DecisionOutcome,
    Evaluation,
    Stage,
    Step,
    afterwards,
    compose,
)
from gpuscale.autoscaler.domain.engine import Memory, Question, Result, asked
from gpuscale.autoscaler.domain.inputs import NO_GROUP, GroupOfReplica, Inputs, Observation, WorkerGroup
from gpuscale.autoscaler.domain.planning import Plan, crash_delay, plan_sets, set_states, startup_seconds
from gpuscale.autoscaler.domain.replicas import Moment, Replica, ReplicaState, asked_to_stop
from gpuscale.autoscaler.domain.signals import EndpointPast
from gpuscale.autoscaler.domain.spec import Endpoint
from gpuscale.autoscaler.state import decision_log, store, watcher_store
from gpuscale.autoscaler.state.decision_log import Recorded, Repetition
from gpuscale.autoscaler.state.store import Connection
from gpuscale.common.names import adapter_name

_ID_LENGTH = 12


@dataclass(frozen=True, slots=True)
class PassFacts:
    """What a pass goes by, gathered before its transaction.

    Attributes:
        at: the moment of the pass.
        live: ids of the adapters that are heard of.
        observations: what the endpoint's signals show, by id.
        past: what is remembered of the endpoint.
        evaluate: whether rules are read, or only the number wanted is acted on.
        busy: how busy replicas are, by id, as far as they say so.
        room: how many more replicas there are GPUs for; None where nobody asked, or knows.
        endpoint: as it was when the readings were gathered; None where it was not there.
        repeated: its last decision, where more is known of it than is on disk.
    """

    at: Moment
    live: frozenset[str]
    observations: Mapping[str, Observation]
    past: EndpointPast
    evaluate: bool
    endpoint: Endpoint | None
    busy: Mapping[str, float]
    room: int | None = None
    repeated: Repetition | None = None


@dataclass(frozen=True, slots=True)
class Pass:
    """What came of the transaction.

    Attributes:
        endpoint: as it stands now.
        evaluation: of the rules; None where they were not read.
        granted: replicas that have their GPUs, before pending ones are acted on.
        steps: what is to be done, as steps of a decision.
        live: replicas that have not ended, with those that were just decided.
        told: ids of adapters whose replicas were asked to stop.
        delay: seconds for which no replacement starts.
        recorded: the decision that was recorded with it, if one was; it is complete unless replicas are pending.
        owing: whether reservations of replicas that ended are still to be released.
        past: what is to be remembered of the endpoint.
        question: what the evaluation went by.
    """

    endpoint: Endpoint
    evaluation: Evaluation | None
    granted: int
    steps: tuple[Step, ...]
    live: tuple[Replica, ...]
    told: frozenset[str]
    delay: float
    recorded: Recorded | None
    owing: bool
    past: EndpointPast
    question: Question | None = None


@dataclass(frozen=True, slots=True)
class _Replicas:
    """The replicas of an endpoint: all that are kept, those that have not ended, and the adapters that are silent."""

    kept: Sequence[Replica]
    rows: Sequence[Replica]
    silent: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Plans:
    """The plan of each capability set, and seconds until one of it may start, for those that want to start some."""

    plans: Mapping[str, Plan]
    delays: Mapping[str, float]

    @property
    def stops(self) -> list[Replica]:
        """The replicas to stop."""
        return [victim for planned in self.plans.values() for victim in planned.stop]

    @property
    def acts(self) -> bool:
        """Whether a replica is to be stopped or started now."""
        return bool(self.stops) or not all(self.delays.values())


def run_pass(connection: Connection, endpoint_id: str, facts: PassFacts) -> Pass | None:
    """Evaluate, plan and write; None where the endpoint is gone, or goes now that its last replica has."""
    endpoint = store.endpoint(connection, endpoint_id, facts.endpoint)
    if endpoint is None:
        return None
    replicas = _replicas(connection, endpoint, facts)
    if endpoint.deleting and all(one.ended and not one.owes_release for one in replicas.kept):
        _remove(connection, endpoint_id)
        return None
    question = _question(connection, endpoint, replicas, facts)
    result = asked(question) if question else None
    after = _aimed(connection, endpoint, result, facts)
    plans = _planned(after, replicas, facts)
    steps = _steps(replicas, plans)
    live = _write_intents(connection, after, replicas.rows, plans, facts.at)
    granted = sum(one.granted for one in live)
    evaluation = result.evaluation if result else None
    changed = plans.acts or after is not endpoint
    recorded = None
    if changed or (evaluation and not any(one.state is ReplicaState.PENDING for one in live)):
        outcome = DecisionOutcome(granted, steps)
        decision = compose(after, evaluation, outcome) if evaluation else afterwards(after, outcome)
        recorded = decision_log.record(
            connection, decision, facts.at.wall, question, before=facts.repeated, quiet=not changed
        )
    return Pass(
        endpoint=after,
        evaluation=evaluation,
        granted=granted,
        steps=steps,
        live=live,
        told=frozenset(one.adapter for one in plans.stops if one.adapter),
        delay=min(filter(None, plans.delays.values()), default=0.0),
        recorded=recorded,
        owing=any(one.owes_release for one in replicas.kept),
        past=replace(facts.past, memory=result.memory, bursts=result.bursts) if result else facts.past,
        question=question,
    )


def _replicas(connection: Connection, endpoint: Endpoint, facts: PassFacts) -> _Replicas:
    """Read the replicas; those that nobody was told of are asked to stop if the spec has another template by now.

    Nobody may have the template that they wait for, and they would hold up the ones that take their place.
    """
    kept: list[Replica] = []
    for one in store.replicas(connection, endpoint.id, show_ended=True):
        spec = endpoint.spec.of_set(one.group.set)
        if one.state is ReplicaState.PENDING and one.template != spec.started_from:
            kept.append(asked_to_stop(one, "its endpoint has another template by now", facts.at))
            store.save_replica(connection, kept[-1])
        else:
            kept.append(one)
    rows = [one for one in kept if not one.ended]
    if len(kept) - len(rows) > store.KEPT:
        store.prune(connection, endpoint.id)
    return _Replicas(kept, rows, frozenset(one.adapter for one in rows if one.adapter) - facts.live)


def _question(
    connection: Connection, endpoint: Endpoint, replicas: _Replicas, facts: PassFacts
) -> Question | None:
    """What the rules go by; None where they are not read.

    A spec that changed since its signals were read waits for the pass that this change asks for.
    """
    gathered_for = facts.endpoint.etag if facts.endpoint else None
    if not facts.evaluate or endpoint.deleting or endpoint.etag != gathered_for:
        return None
    kept, rows, memory = replicas.kept, replicas.rows, facts.past.memory
    inputs = Inputs(
        before=endpoint.desired,
        ready=sum(one.state is ReplicaState.READY for one in rows),
        now=facts.at.now,
        wall=facts.at.wall,
        observations=facts.observations,
        series=facts.past.series,
        last_changes=store.rule_changes(connection, endpoint.id),
        bursts=facts.past.bursts,
        startup=startup_seconds(kept, facts.at),
        sets=set_states(endpoint, kept, facts.at.now, facts.busy),
        gpu_limit=None if facts.room is None else sum(one.granted for one in rows) + facts.room,
    )
    unknown = sum(one.adapter in replicas.silent for one in rows)
    return Question(endpoint.spec, inputs, Memory(facts.at.now) if memory is None else memory, unknown)


def _aimed(connection: Connection, endpoint: Endpoint, result: Result | None, facts: PassFacts) -> Endpoint:
    """The endpoint, aiming at what was evaluated; stored with the cooldowns that begin where that is another count."""
    if result is None:
        return endpoint
    evaluation = result.evaluation
    sets = {one: count.wanted for one, count in evaluation.sets.items()}
    same_sets = not endpoint.spec.capability_sets or sets == endpoint.targets
    if evaluation.wanted == endpoint.desired and same_sets:
        return endpoint
    aimed = replace(endpoint, desired=evaluation.wanted, sets=sets)
    store.save_endpoint(connection, aimed)
    store.save_rule_changes(connection, endpoint.id, evaluation.effective, facts.at.now)
    return aimed


def _planned(endpoint: Endpoint, replicas: _Replicas, facts: PassFacts) -> _Plans:
    """What brings the replicas closer to the count; those of another capability set have failures of their own."""
    plans = plan_sets(endpoint.targets, replicas.rows, replicas.silent, endpoint.spec, facts.busy)
    starting = [one for one, planned in plans.items() if planned.start]
    own = {one: [replica for replica in replicas.kept if replica.group.set == one] for one in starting}
    return _Plans(plans, {one: crash_delay(own[one], facts.at.now) for one in starting})


def _write_intents(
    connection: Connection, endpoint: Endpoint, rows: Sequence[Replica], plans: _Plans, at: Moment
) -> tuple[Replica, ...]:
    """Write who stops and who starts; returns the replicas that have not ended after that."""
    stopped: dict[str, Replica] = {}
    for set_id, planned in plans.plans.items():
        wanted = f"{endpoint.targets.get(set_id, 0)} {set_id or 'replicas'} are wanted"
        reason = "its endpoint is deleted" if endpoint.deleting else wanted
        stopped |= {one.id: asked_to_stop(one, reason, at) for one in planned.stop}
    store.save_replicas(connection, stopped.values())
    due = (set_id for set_id, delay in plans.delays.items() if not delay)
    started = [_decided(endpoint, one, at) for one in due for _ in range(plans.plans[one].start)]
    for replica in started:
        store.add_replica(connection, replica)
    left = (stopped.get(one.id, one) for one in rows)
    return (*(one for one in left if not one.ended), *started)


def _decided(endpoint: Endpoint, set_id: str, at: Moment) -> Replica:
    request_id = str(uuid4())
    asked = next((one for one in endpoint.spec.capability_sets if one.id == set_id), None)
    group = NO_GROUP
    if asked is not None:
        group = GroupOfReplica(set_id, WorkerGroup(asked.capabilities, asked.workers))
    return Replica(
        endpoint.id,
        request_id.replace("-", "")[:_ID_LENGTH],
        request_id,
        endpoint.spec.of_set(set_id).started_from,
        at.wall,
        group=group,
    )


def _steps(replicas: _Replicas, plans: _Plans) -> tuple[Step, ...]:
    """What is to be done, as steps of a decision."""
    steps: list[Step] = []
    rows, silent = replicas.rows, replicas.silent
    if silent:
        count = sum(one.aimed_at for one in rows)
        lost = sum(one.adapter in silent for one in rows)
        text = f"{lost} replicas have not been heard of (adapters: {', '.join(sorted(silent))}); nothing takes their place"
        steps.append(Step(Stage.ACT, Code.ADAPTER_LOST, count, count, text))
    for set_id, planned in plans.plans.items():
        own = [one for one in rows if one.group.set == set_id]
        steps += _steps_of_set(set_id, own, planned, plans.delays.get(set_id, 0.0))
    return tuple(steps)


def _steps_of_set(set_id: str, rows: Sequence[Replica], planned: Plan, delay: float) -> list[Step]:
    count = sum(one.aimed_at for one in rows)
    steps: list[Step] = []

    def add(code: Code, after: int, text: str) -> None:
        steps.append(Step(Stage.ACT, code, count, after, text, capability_set=set_id))

    if planned.start and delay:
        add(Code.BACK_OFF, count, f"replicas ended by themselves: the next one starts in {delay:.1f} s")
    elif planned.start:
        add(Code.START, count + planned.start, f"starts {planned.start} more {set_id}".rstrip())
    if planned.stop:
        victims = ", ".join(
            f"{one.id} on {adapter_name(one.adapter)}" if one.adapter else one.id for one in planned.stop
        )
        add(Code.STOP, count - len(planned.stop), f"asked to finish and stop: {victims}")
    return steps


def _remove(connection: Connection, endpoint_id: str) -> None:
    store.remove_endpoint(connection, endpoint_id)
    store.remove_replicas(connection, endpoint_id)
    decision_log.remove_decisions(connection, endpoint_id)
    watcher_store.remove_readings(connection, endpoint_id)
