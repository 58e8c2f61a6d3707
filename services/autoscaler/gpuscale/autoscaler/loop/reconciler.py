"""Drives every endpoint towards what is wanted of it: one loop each, by level and not by edge.

An endpoint is looked at when its tick is due, and at once when its spec, its replicas or its adapters changed, or when
GPUs became free. Rules are read at ticks and after changes of the spec only. Whatever fails for one endpoint is tried
again later, and stops no other.

The heart of a look is a pass, one transaction: the new count, the cooldowns that it starts, the decision that explains it,
and the intents that follow from it are on disk together or not at all. Only then does anything happen outside.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple
from uuid import uuid4

from gpuscale.autoscaler.domain.decisions import (
    Code,
    Decision,
    DecisionOutcome,
    Evaluation,
    Stage,
    Step,
    afterwards,
    compose,
    sameness,
)
from gpuscale.autoscaler.domain.engine import Memory, Question, Result, asked
from gpuscale.autoscaler.domain.inputs import NO_GROUP, GroupOfReplica, Inputs, Observation, WorkerGroup
from gpuscale.autoscaler.domain.planning import Plan, crash_delay, plan_sets, set_states, startup_seconds
from gpuscale.autoscaler.domain.replicas import Moment, Replica, ReplicaState, asked_to_stop
from gpuscale.autoscaler.domain.signals import EndpointPast, Samples, noted
from gpuscale.autoscaler.domain.spec import Endpoint
from gpuscale.autoscaler.loop.hub import AdapterHub, Followers, Wake, Wakes
from gpuscale.autoscaler.loop.leases import AGAIN, RETRY, Actor, LeaseKeeper, StartRefusal
from gpuscale.autoscaler.signals.sources import Histories, SignalSources, WatcherUses
from gpuscale.autoscaler.state import decision_log, store, watcher_store
from gpuscale.autoscaler.state.decision_log import DecisionFile, Recorded, Repetition, Repetitions
from gpuscale.autoscaler.state.store import Connection
from gpuscale.common.errors import GpuscaleError
from gpuscale.common.names import adapter_name
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import Backoff, Clock, TaskScope
from gpuscale.common.store.store import Store

CONCURRENT = 16
"""Endpoints that are looked at at a time."""
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Dependencies:
    """What a pass works with."""

    store: Store
    clock: Clock
    sources: SignalSources
    hub: AdapterHub
    actor: Actor
    keeper: LeaseKeeper
    uses: WatcherUses
    followers: Followers
    file: DecisionFile
    histories: Histories
    repetitions: Repetitions


class Reconciler:
    """Runs the loops of all endpoints that `wakes` announces."""

    def __init__(self, deps: Dependencies, wakes: Wakes) -> None:
        self._deps = deps
        self._wakes = wakes
        self._limit = asyncio.Semaphore(CONCURRENT)
        self._loops: dict[str, EndpointLoop] = {}

    def past(self, endpoint_id: str) -> EndpointPast:
        """What is remembered of an endpoint; nothing before its first look."""
        loop = self._loops.get(endpoint_id)
        return loop.past if loop is not None else EndpointPast()

    def samples(self, endpoint_id: str) -> Mapping[str, Samples]:
        """What each signal of an endpoint showed at its evaluations, by id; nothing before the first."""
        loop = self._loops.get(endpoint_id)
        return loop.samples if loop is not None else {}

    def counts(self) -> Iterator[tuple[str, EndpointCounts, float]]:
        """Each endpoint's counts at its last look, and how many seconds its evaluation is late."""
        for endpoint_id, loop in sorted(self._loops.items()):
            if loop.counts is not None:
                yield endpoint_id, loop.counts, loop.lateness

    async def run(self) -> None:
        """Begin with the stored endpoints; never ends."""
        for endpoint in await self._deps.store.read(store.endpoints):
            self._wakes.call(endpoint.id)
        async with TaskScope() as scope:
            while True:
                endpoint_id, wake = await self._wakes.arrival()
                scope.start(f"endpoint {endpoint_id}", self._keep(endpoint_id, wake))

    async def _keep(self, endpoint_id: str, wake: Wake) -> None:
        loop = self._loops[endpoint_id] = EndpointLoop(endpoint_id, self._deps)
        backoff = Backoff(initial=0.5, cap=10.0)
        wait = 0.0
        while True:
            await wake.wait(wait)
            async with self._limit:
                # Whatever fails is this endpoint's, and not the end of the loops of all others.
                (wanted,) = await asyncio.gather(loop.look(evaluate=wake.answer()), return_exceptions=True)
            if isinstance(wanted, BaseException):
                _warn(endpoint_id, wanted)
                wait = backoff.next()
                continue
            backoff.reset()
            wake.waiting = loop.waiting
            wait = wanted or 0.0
            if wanted is not None:
                continue
            self._deps.sources.forget(endpoint_id)
            self._deps.histories.forget(endpoint_id)
            self._deps.repetitions.forget(endpoint_id)
            if not wake.called:
                del self._loops[endpoint_id]
                self._deps.uses.set(endpoint_id, frozenset())
                self._wakes.forget(endpoint_id)
                return
            # It may have been created anew meanwhile: what was remembered of the one that is gone is not its past.
            loop = self._loops[endpoint_id] = EndpointLoop(endpoint_id, self._deps)


def _warn(endpoint_id: str, error: BaseException) -> None:
    """Tell of what failed; with a traceback where nobody foresaw it."""
    unforeseen = None if isinstance(error, GpuscaleError) else error
    _log.warning(
        "an endpoint could not be looked after", endpoint=endpoint_id, error=str(error), exc_info=unforeseen
    )


class EndpointCounts(NamedTuple):
    """Replicas of an endpoint: wanted, with their GPUs, and ready."""

    desired: int
    granted: int
    ready: int


class EndpointLoop:
    """What is remembered of one endpoint between two looks; all that matters is in the store."""

    def __init__(self, endpoint_id: str, deps: Dependencies) -> None:
        self.waiting = False
        self.samples: Mapping[str, Samples] = {}
        self.counts: EndpointCounts | None = None
        self._id = endpoint_id
        self._deps = deps
        self._evaluation_due = 0.0
        self._past = EndpointPast()
        self._asked = True
        self._last_news = ""
        self._last_written = ""
        self._granted = 0, 0.0
        self._wanted: int | None = None
        self._endpoint: Endpoint | None = None

    @property
    def past(self) -> EndpointPast:
        """What is remembered of its signals and counts."""
        return self._past

    @property
    def lateness(self) -> float:
        """Seconds that its evaluation is late."""
        return max(0.0, self._deps.clock.now() - self._evaluation_due)

    async def look(self, *, evaluate: bool) -> float | None:
        """Evaluate if it is time, act, and note what came of it.

        Returns:
            Seconds until the next look; None once the endpoint is gone.

        Raises:
            GpuscaleError: the state cannot be read or written; the look is to be repeated.
        """
        deps = self._deps
        self._asked = self._asked or evaluate or deps.clock.now() >= self._evaluation_due
        found = partial(_found, endpoint_id=self._id, known=self._endpoint)
        self._endpoint, replicas = await deps.store.read(found)
        facts = self._facts(self._endpoint, replicas)
        passed = await deps.store.write(partial(run_pass, endpoint_id=self._id, facts=facts))
        self._tell(passed.endpoint.desired if passed else None)
        if passed is None:
            return None
        self._past = passed.past
        spec = passed.endpoint.spec
        deps.uses.set(self._id, spec.watchers)
        await deps.histories.note(self._id, spec, facts.at)
        if passed.evaluation is not None:
            self._asked, self._evaluation_due = False, facts.at.now + spec.period
            self.samples = noted(self.samples, passed.evaluation.observations, facts.at.wall.timestamp())
        await deps.hub.refresh(passed.told)
        if not any(one.state is ReplicaState.PENDING for one in passed.live):
            if passed.owing:
                deps.keeper.changed()
            return self._pause(passed, None, await self._note(passed, None, passed.live))
        try:
            refusal = await deps.actor.act(passed.live, passed.endpoint.tenant)
        finally:
            deps.keeper.changed()
        after = await deps.store.read(partial(store.replicas, endpoint=self._id))
        return self._pause(passed, refusal, await self._note(passed, refusal, after))

    def _tell(self, wanted: int | None) -> None:
        """Tell the followers where another number is wanted than at the last look; None: the endpoint is gone."""
        if wanted is None or wanted != self._wanted:
            self._wanted = wanted
            self._deps.followers.tell(self._id)

    def _facts(self, endpoint: Endpoint | None, replicas: Sequence[Replica]) -> PassFacts:
        """What the pass goes by; where the endpoint is not there (yet), the pass alone finds out."""
        deps = self._deps
        at = Moment(deps.clock.now(), deps.clock.wall())
        observations: dict[str, Observation] = {}
        room: int | None = None
        if endpoint is not None:
            deps.sources.keep(endpoint.id, replicas)
            samples = deps.sources.sample(endpoint, replicas)
            self._past = self._past.with_samples(endpoint.spec, samples)
            observations = self._past.observations(endpoint.spec, samples, at.now)
            granted = sum(one.granted for one in replicas)
            if granted != self._granted[0]:
                self._granted = granted, at.now
            room = deps.sources.more(endpoint.spec, deps.hub.facts(), self._granted[1])
        return PassFacts(
            at=at,
            live=frozenset(facts.id for facts in deps.hub.facts() if facts.live),
            observations=observations,
            past=self._past,
            evaluate=self._asked,
            endpoint=endpoint,
            busy=deps.sources.busy(endpoint) if endpoint else {},
            room=room,
            repeated=deps.repetitions.of(self._id),
        )

    async def _note(
        self, passed: Pass, refusal: StartRefusal | None, after: Sequence[Replica]
    ) -> Sequence[Replica]:
        """Complete the decision with what was done about it; between evaluations only if that is news."""
        outcome = _outcome(passed, refusal, after)
        decision = afterwards(passed.endpoint, outcome)
        news, last, self._last_news = sameness(decision), self._last_news, sameness(decision)
        if passed.evaluation is not None:
            decision = compose(passed.endpoint, passed.evaluation, outcome)
        elif passed.recorded is None and (news == last or not (outcome.steps or self.waiting)):
            return after
        await self._record(passed, decision, complete=after is passed.live)
        return after

    async def _record(self, passed: Pass, decision: Decision, *, complete: bool) -> None:
        """Store a decision, or complete the one that the pass stored; what is news goes to the file too."""
        deps, recorded, wall = self._deps, passed.recorded, self._deps.clock.wall()
        if recorded is None:
            added = partial(
                decision_log.record,
                decision=decision,
                wall=wall,
                question=passed.question,
                before=deps.repetitions.of(self._id),
                quiet=True,
            )
            recorded = await deps.store.write(added)
        elif not complete:
            amended = partial(
                decision_log.amend,
                decision_id=recorded.times.decision,
                decision=decision,
                question=passed.question,
            )
            await deps.store.write(amended)
        deps.repetitions.note(recorded, decision, wall, passed.question)
        if sameness(decision) != self._last_written:
            self._last_written = sameness(decision)
            self._deps.file.put(decision_log.shown(decision, recorded.times.decision, wall))

    def _pause(self, passed: Pass, refusal: StartRefusal | None, after: Sequence[Replica]) -> float:
        """Seconds until the next look; few where more replicas are to be decided than may wait at a time."""
        self.waiting = refusal is not None
        ready = sum(one.state is ReplicaState.READY for one in after)
        self.counts = EndpointCounts(passed.endpoint.desired, sum(one.granted for one in after), ready)
        pauses = [max(0.0, self._evaluation_due - self._deps.clock.now())]
        if passed.endpoint.deleting:
            pauses = [RETRY]
        if refusal is not None:
            pauses.append(refusal.retry_after)
        if passed.delay:
            pauses.append(passed.delay)
        if not (refusal or passed.delay) and sum(one.aimed_at for one in after) < passed.endpoint.desired:
            pauses.append(AGAIN)
        return min(pauses)


def _found(
    connection: Connection, endpoint_id: str, known: Endpoint | None
) -> tuple[Endpoint | None, Sequence[Replica]]:
    """The endpoint, and those of its replicas that have not ended."""
    return store.endpoint(connection, endpoint_id, known), store.replicas(connection, endpoint_id)


def _outcome(passed: Pass, refusal: StartRefusal | None, after: Sequence[Replica]) -> DecisionOutcome:
    granted = sum(one.granted for one in after)
    steps = list(passed.steps)
    reserved = sum(one.granted and one.lease is not None for one in after) - sum(
        one.granted and one.lease is not None for one in passed.live
    )
    if reserved > 0:
        text = f"GPUs reserved for {reserved} more"
        steps.append(Step(Stage.GPU, Code.GRANTED, passed.granted, granted, text))
    if refusal is not None:
        steps.append(Step(refusal.stage, refusal.code, passed.endpoint.desired, granted, refusal.text))
    return DecisionOutcome(granted, tuple(steps))


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
