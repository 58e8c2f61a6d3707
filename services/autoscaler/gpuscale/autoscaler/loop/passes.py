"""One pass over an endpoint, as one transaction: evaluate, plan, and write down every intent with its decision.

The new count, the cooldowns that it starts, the decision that explains it, and the intents that follow from it are on disk
together or not at all. Only then does anything happen outside.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from uuid import uuid4

from gpuscale.autoscaler import decision_log, decision_store
from gpuscale.autoscaler.state import history_store, replica_store, store
from gpuscale.autoscaler.domain.decisions import Outcome, afterwards, compose
from gpuscale.autoscaler.model import Code, Endpoint, Evaluation, Observation, Stage, Step
from gpuscale.autoscaler.domain.pace import Memory
from gpuscale.autoscaler.domain.planning import Plan, crash_delay, plan, startup_seconds
from gpuscale.autoscaler.domain.policies.outcome import Inputs
from gpuscale.autoscaler.remembered import Remembered
from gpuscale.autoscaler.domain.replicas import Moment, Replica, ReplicaState, asked_to_stop
from gpuscale.autoscaler.state.store import Connection
from gpuscale.autoscaler.domain.whatif import Question, asked
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
        etag: of the spec that the readings were gathered for.
    """

    at: Moment
    live: frozenset[str]
    observations: Mapping[str, Observation]
    past: Remembered
    evaluate: bool
    etag: str
    busy: Mapping[str, float]
    room: int | None = None


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
        decision: id of the decision that was stored with it, if one was; it is complete unless replicas are pending.
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
    decision: int | None
    owing: bool
    past: Remembered
    question: Question | None = None


def run_pass(connection: Connection, endpoint_id: str, facts: Facts) -> Pass | None:
    """Evaluate, plan and write; None where the endpoint is gone, or goes now that its last replica has."""
    endpoint = store.endpoint(connection, endpoint_id)
    if endpoint is None:
        return None
    kept = replica_store.replicas(connection, endpoint_id, show_ended=True)
    if endpoint.deleting and all(one.ended and not one.owes_release for one in kept):
        _remove(connection, endpoint_id)
        return None
    kept = _renounced(connection, endpoint, kept, facts.at)
    rows = [one for one in kept if not one.ended]
    if len(kept) - len(rows) > replica_store.KEPT:
        replica_store.prune(connection, endpoint_id)
    silent = frozenset(one.adapter for one in rows if one.adapter) - facts.live
    question = _question(connection, endpoint, kept, silent, facts)
    result = asked(question) if question else None
    evaluation = result.evaluation if result else None
    if evaluation is not None and evaluation.wanted != endpoint.desired:
        endpoint = replace(endpoint, desired=evaluation.wanted)
        store.save_endpoint(connection, endpoint)
        store.save_rule_changes(connection, endpoint_id, evaluation.effective, facts.at.now)
    delay = crash_delay(kept, facts.at.now)
    planned = plan(endpoint.desired, rows, silent, endpoint.spec.template, facts.busy)
    steps = _steps(rows, planned, silent, delay)
    live = _carry_out(connection, endpoint, rows, planned, delay, facts.at)
    granted = sum(one.granted for one in live)
    changed = (
        planned.stop
        or (planned.start and not delay)
        or (evaluation and evaluation.wanted != evaluation.before)
    )
    noted = None
    if changed or (evaluation and not any(one.state is ReplicaState.PENDING for one in live)):
        outcome = Outcome(granted, steps)
        decision = compose(endpoint, evaluation, outcome) if evaluation else afterwards(endpoint, outcome)
        noted = decision_log.record(connection, decision, facts.at.wall, question)
    return Pass(
        endpoint=endpoint,
        evaluation=evaluation,
        granted=granted,
        steps=steps,
        live=live,
        told=frozenset(one.adapter for one in planned.stop if one.adapter),
        delay=delay if planned.start else 0.0,
        decision=noted,
        owing=any(one.owes_release for one in kept),
        past=replace(facts.past, memory=result.memory, bursts=result.bursts) if result else facts.past,
        question=question,
    )


def _question(
    connection: Connection, endpoint: Endpoint, kept: Sequence[Replica], silent: frozenset[str], facts: Facts
) -> Question | None:
    """What the rules go by; None where they are not read.

    A spec that changed since its signals were read waits for the pass that this change asks for.
    """
    if not facts.evaluate or endpoint.deleting or endpoint.etag != facts.etag:
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
        if one.state is ReplicaState.PENDING and one.template != endpoint.spec.started_from:
            after.append(asked_to_stop(one, reason, at))
            replica_store.save_replica(connection, after[-1])
        else:
            after.append(one)
    return after


def _carry_out(
    connection: Connection,
    endpoint: Endpoint,
    rows: Sequence[Replica],
    planned: Plan,
    delay: float,
    at: Moment,
) -> tuple[Replica, ...]:
    """Write the intents; returns the replicas that have not ended after that."""
    reason = "its endpoint is deleted" if endpoint.deleting else f"{endpoint.desired} replicas are wanted"
    stopped = {one.id: asked_to_stop(one, reason, at) for one in planned.stop}
    replica_store.save_replicas(connection, stopped.values())
    started = [_decided(endpoint, at) for _ in range(0 if delay else planned.start)]
    for one in started:
        replica_store.add_replica(connection, one)
    left = (stopped.get(one.id, one) for one in rows)
    return (*(one for one in left if not one.ended), *started)


def _decided(endpoint: Endpoint, at: Moment) -> Replica:
    request_id = str(uuid4())
    return Replica(
        endpoint.id, request_id.replace("-", "")[:_ID_LENGTH], request_id, endpoint.spec.started_from, at.wall
    )


def _steps(rows: Sequence[Replica], planned: Plan, silent: frozenset[str], delay: float) -> tuple[Step, ...]:
    count = sum(one.aimed_at for one in rows)
    steps: list[Step] = []

    def add(code: Code, after: int, text: str) -> None:
        steps.append(Step(Stage.ACT, code, count, after, text))

    if silent:
        lost = sum(1 for one in rows if one.adapter in silent)
        text = f"{lost} replicas have not been heard of (adapters: {', '.join(sorted(silent))}); nothing takes their place"
        add(Code.ADAPTER_LOST, count, text)
    if planned.start and delay:
        add(Code.BACK_OFF, count, f"replicas ended by themselves: the next one starts in {delay:.1f} s")
    elif planned.start:
        add(Code.START, count + planned.start, f"starts {planned.start} more")
    if planned.stop:
        victims = ", ".join(
            f"{one.id} on {adapter_name(one.adapter)}" if one.adapter else one.id for one in planned.stop
        )
        add(Code.STOP, count - len(planned.stop), f"asked to finish and stop: {victims}")
    return tuple(steps)


def _remove(connection: Connection, endpoint_id: str) -> None:
    store.remove_endpoint(connection, endpoint_id)
    replica_store.remove_replicas(connection, endpoint_id)
    decision_store.remove_decisions(connection, endpoint_id)
    history_store.remove_readings(connection, endpoint_id)
