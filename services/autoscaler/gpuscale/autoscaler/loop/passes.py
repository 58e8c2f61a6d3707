"""One pass over an endpoint, as one transaction: evaluate, plan, and write down every intent with its decision.

The new count, the cooldowns that it starts, the decision that explains it, and the intents that follow from it are on disk
together or not at all. Only then does anything happen outside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from uuid import uuid4

from gpuscale.autoscaler.domain.decisions import Code, Evaluation, Outcome, Stage, Step, afterwards, compose
from gpuscale.autoscaler.domain.engine import Memory
from gpuscale.autoscaler.domain.inputs import NO_GROUP, GroupOfReplica, Inputs, Observation, WorkerGroup
from gpuscale.autoscaler.domain.planning import Plan, crash_delay, plan_sets, set_states, startup_seconds
from gpuscale.autoscaler.domain.replicas import Moment, Replica, ReplicaState, asked_to_stop
from gpuscale.autoscaler.domain.signals import Remembered
from gpuscale.autoscaler.domain.spec import Endpoint
from gpuscale.autoscaler.domain.whatif import Question, asked
from gpuscale.autoscaler.state import decision_log, store, watcher_store
from gpuscale.autoscaler.state.decision_log import Recorded, Repetition
from gpuscale.autoscaler.state.store import Connection
from gpuscale.common.names import adapter_name

_ID_LENGTH = 12


@dataclass(frozen=True, slots=True)
class Facts:
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
    past: Remembered
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
    past: Remembered
    question: Question | None = None


def run_pass(connection: Connection, endpoint_id: str, facts: Facts) -> Pass | None:
    """Evaluate, plan and write; None where the endpoint is gone, or goes now that its last replica has."""
    endpoint = store.endpoint(connection, endpoint_id, facts.endpoint)
    if endpoint is None:
        return None
    kept = store.replicas(connection, endpoint_id, show_ended=True)
    if endpoint.deleting and all(one.ended and not one.owes_release for one in kept):
        _remove(connection, endpoint_id)
        return None
    kept = _renounced(connection, endpoint, kept, facts.at)
    rows = [one for one in kept if not one.ended]
    if len(kept) - len(rows) > store.KEPT:
        store.prune(connection, endpoint_id)
    silent = frozenset(one.adapter for one in rows if one.adapter) - facts.live
    question = _question(connection, endpoint, kept, silent, facts)
    result = asked(question) if question else None
    evaluation = result.evaluation if result else None
    moved = evaluation is not None and _moved(endpoint, evaluation)
    if evaluation is not None and moved:
        endpoint = replace(endpoint, desired=evaluation.wanted, sets=_wanted(evaluation))
        store.save_endpoint(connection, endpoint)
        store.save_rule_changes(connection, endpoint_id, evaluation.effective, facts.at.now)
    plans = plan_sets(endpoint.targets, rows, silent, endpoint.spec, facts.busy)
    delays = {one: _delay(kept, one, facts.at.now) for one, planned in plans.items() if planned.start}
    steps = _steps(rows, plans, silent, delays)
    live = _carry_out(connection, endpoint, rows, plans, delays, facts.at)
    granted = sum(one.granted for one in live)
    stops = [victim for planned in plans.values() for victim in planned.stop]
    changed = stops or not all(delays.values()) or moved
    noted = None
    if changed or (evaluation and not any(one.state is ReplicaState.PENDING for one in live)):
        outcome = Outcome(granted, steps)
        decision = compose(endpoint, evaluation, outcome) if evaluation else afterwards(endpoint, outcome)
        noted = decision_log.record(
            connection, decision, facts.at.wall, question, before=facts.repeated, quiet=not changed
        )
    return Pass(
        endpoint=endpoint,
        evaluation=evaluation,
        granted=granted,
        steps=steps,
        live=live,
        told=frozenset(one.adapter for one in stops if one.adapter),
        delay=min(filter(None, delays.values()), default=0.0),
        recorded=noted,
        owing=any(one.owes_release for one in kept),
        past=replace(facts.past, memory=result.memory, bursts=result.bursts) if result else facts.past,
        question=question,
    )


def _moved(endpoint: Endpoint, evaluation: Evaluation) -> bool:
    """Whether an evaluation aims at another count, of all replicas or of a capability set."""
    if endpoint.spec.capability_sets:
        return evaluation.wanted != endpoint.desired or _wanted(evaluation) != endpoint.targets
    return evaluation.wanted != endpoint.desired


def _wanted(evaluation: Evaluation) -> dict[str, int]:
    return {one: count.wanted for one, count in evaluation.sets.items()}


def _delay(kept: Sequence[Replica], set_id: str, now: float) -> float:
    """Seconds until one of a capability set may start: those of another set have failures of their own."""
    return crash_delay((one for one in kept if one.group.set == set_id), now)


def _question(
    connection: Connection, endpoint: Endpoint, kept: Sequence[Replica], silent: frozenset[str], facts: Facts
) -> Question | None:
    """What the rules go by; None where they are not read.

    A spec that changed since its signals were read waits for the pass that this change asks for.
    """
    gathered_for = facts.endpoint.etag if facts.endpoint else None
    if not facts.evaluate or endpoint.deleting or endpoint.etag != gathered_for:
        return None
    rows = [one for one in kept if not one.ended]
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
    unknown = sum(1 for one in rows if one.adapter in silent)
    memory = facts.past.memory
    return Question(endpoint.spec, inputs, Memory(facts.at.now) if memory is None else memory, unknown)


def _renounced(
    connection: Connection, endpoint: Endpoint, kept: Sequence[Replica], at: Moment
) -> list[Replica]:
    """The replicas, after those were asked to stop that nobody was told of and that the spec has another template for.

    Nobody may have the template that they wait for, and they would hold up the ones that take their place.
    """
    reason = "its endpoint has another template by now"
    after: list[Replica] = []
    for one in kept:
        spec = endpoint.spec.of_set(one.group.set)
        if one.state is ReplicaState.PENDING and one.template != spec.started_from:
            after.append(asked_to_stop(one, reason, at))
            store.save_replica(connection, after[-1])
        else:
            after.append(one)
    return after


def _carry_out(
    connection: Connection,
    endpoint: Endpoint,
    rows: Sequence[Replica],
    plans: Mapping[str, Plan],
    delays: Mapping[str, float],
    at: Moment,
) -> tuple[Replica, ...]:
    """Write the intents; returns the replicas that have not ended after that."""
    stopped: dict[str, Replica] = {}
    for set_id, planned in plans.items():
        wanted = f"{endpoint.targets.get(set_id, 0)} {set_id or 'replicas'} are wanted"
        reason = "its endpoint is deleted" if endpoint.deleting else wanted
        stopped |= {one.id: asked_to_stop(one, reason, at) for one in planned.stop}
    store.save_replicas(connection, stopped.values())
    started = [
        _decided(endpoint, set_id, at)
        for set_id, delay in delays.items()
        if not delay
        for _ in range(plans[set_id].start)
    ]
    for one in started:
        store.add_replica(connection, one)
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


def _steps(
    rows: Sequence[Replica],
    plans: Mapping[str, Plan],
    silent: frozenset[str],
    delays: Mapping[str, float],
) -> tuple[Step, ...]:
    steps: list[Step] = []
    if silent:
        count = sum(one.aimed_at for one in rows)
        lost = sum(1 for one in rows if one.adapter in silent)
        text = f"{lost} replicas have not been heard of (adapters: {', '.join(sorted(silent))}); nothing takes their place"
        steps.append(Step(Stage.ACT, Code.ADAPTER_LOST, count, count, text))
    for set_id, planned in plans.items():
        own = [one for one in rows if one.group.set == set_id]
        steps += _steps_of_set(set_id, own, planned, delays.get(set_id, 0.0))
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
