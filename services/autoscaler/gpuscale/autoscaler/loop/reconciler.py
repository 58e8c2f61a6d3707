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
    DecisionOutcome,
    Stage,
    Step,
    afterwards,
    compose,
    sameness,
)
from gpuscale.autoscaler.domain.engine import Memory, Question, Result, asked
from gpuscale.autoscaler.domain.inputs import NO_GROUP, GroupOfReplica, Inputs, Observation, WorkerGroup
from gpuscale.autoscaler.domain.planning import (
    Plan,
    clock_time,
    crash_delay,
    losses,
    plan_sets,
    secured,
    set_states,
    startup_seconds,
)
from gpuscale.autoscaler.domain.replicas import Moment, Replica, ReplicaState, asked_to_stop
from gpuscale.autoscaler.domain.signals import EndpointPast, Samples, noted
from gpuscale.autoscaler.domain.spec import Endpoint
from gpuscale.autoscaler.loop.hub import AdapterHub, Followers, Wake, Wakes
from gpuscale.autoscaler.loop.leases import AGAIN, RETRY, Actor, LeaseKeeper, StartRefusal
from gpuscale.autoscaler.signals.sources import Histories, SignalSources, WatcherUses
from gpuscale.autoscaler.state import decision_log, store, watcher_store
from gpuscale.autoscaler.state.decision_log import DecisionFile, Recorded, Repetition, Repetitions
from gpuscale.autoscaler.state.store import Connection
from gpuscale.common.errors import GpuscaleError, UnavailableError
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
                traceback = None if isinstance(wanted, GpuscaleError) else wanted
                said = {"endpoint": endpoint_id, "error": str(wanted)}
                _log.warning("an endpoint could not be looked after", **said, exc_info=traceback)
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


class EndpointCounts(NamedTuple):
    """Replicas of an endpoint: wanted, with their GPUs, and ready."""

    desired: int
    granted: int
    ready: int

    @classmethod
    def of(cls, endpoint: Endpoint, replicas: Sequence[Replica]) -> EndpointCounts:
        """What is wanted of an endpoint, and those of its replicas."""
        ready = sum(one.state is ReplicaState.READY for one in replicas)
        return cls(endpoint.desired, sum(one.granted for one in replicas), ready)


class EndpointLoop:
    """What is remembered of one endpoint between two looks; all that matters is in the store.

    Attributes:
        past: what is remembered of its signals and counts.
        samples: what each of its signals showed at its evaluations, by id.
        waiting: whether it lacks GPUs or an adapter.
        counts: its replicas at the last look; None before the first.
    """

    def __init__(self, endpoint_id: str, deps: Dependencies) -> None:
        self.past = EndpointPast()
        self.samples: Mapping[str, Samples] = {}
        self.waiting = False
        self.counts: EndpointCounts | None = None
        self._id = endpoint_id
        self._deps = deps
        self._evaluation_due = 0.0
        self._asked = True
        self._last_news = ""
        self._last_written = ""
        self._granted = 0, 0.0
        self._wanted: int | None = None
        self._endpoint: Endpoint | None = None

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
        goes = self._endpoint is not None and self._endpoint.deleting
        work = partial(run_pass, endpoint_id=self._id, facts=facts)
        try:
            passed = await deps.store.write(work, frees=goes)
        except UnavailableError as error:
            if error.reason == "DISK_FULL":
                await self._stop_only(facts)
            raise
        wanted = passed.endpoint.desired if passed else None
        if wanted is None or wanted != self._wanted:
            self._wanted = wanted
            deps.followers.tell(self._id)
        if passed is None:
            return None
        spec = passed.endpoint.spec
        deps.uses.set(self._id, spec.watchers)
        await deps.histories.note(self._id, spec, facts.at)
        if passed.result is not None:
            self.past = replace(facts.past, memory=passed.result.memory, bursts=passed.result.bursts)
            self._asked, self._evaluation_due = False, facts.at.now + spec.period
            shown = passed.result.evaluation.observations
            self.samples = noted(self.samples, shown, facts.at.wall.timestamp())
        await deps.hub.refresh(passed.told)
        refusal, after = None, passed.live
        if any(one.state is ReplicaState.PENDING for one in passed.live):
            try:
                refusal = await deps.actor.act(passed.live, passed.endpoint)
            finally:
                deps.keeper.changed()
            after = await deps.store.read(partial(store.replicas, endpoint=self._id))
        elif passed.owing:
            deps.keeper.changed()
        await self._note(passed, refusal, after)
        self.waiting = refusal is not None
        self.counts = EndpointCounts.of(passed.endpoint, after)
        return self._pause(passed, refusal, after)

    async def _stop_only(self, facts: PassFacts) -> None:
        """What stops gives room back, also on a full disk; replicas that will lose their GPUs must not work on until then."""
        work = partial(run_pass, endpoint_id=self._id, facts=replace(facts, evaluate=False, starts=False))
        if (passed := await self._deps.store.write(work, frees=True)) is not None:
            await self._deps.hub.refresh(passed.told)

    def _facts(self, endpoint: Endpoint | None, replicas: Sequence[Replica]) -> PassFacts:
        """What the pass goes by; where the endpoint is not there (yet), the pass alone finds out."""
        deps = self._deps
        at = Moment(deps.clock.now(), deps.clock.wall())
        observations: dict[str, Observation] = {}
        room: int | None = None
        if endpoint is not None:
            deps.sources.keep(endpoint.id, replicas)
            samples = deps.sources.sample(endpoint, replicas)
            self.past = self.past.with_samples(endpoint.spec, samples)
            observations = self.past.observations(endpoint.spec, samples, at.now)
            granted = sum(one.granted for one in replicas)
            if granted != self._granted[0]:
                self._granted = granted, at.now
            room = deps.sources.more(endpoint.spec, deps.hub.facts(), self._granted[1])
        return PassFacts(
            at=at,
            live=frozenset(facts.id for facts in deps.hub.facts() if facts.live),
            observations=observations,
            past=self.past,
            evaluate=self._asked,
            endpoint=endpoint,
            busy=deps.sources.busy(endpoint) if endpoint else {},
            room=room,
            repeated=deps.repetitions.of(self._id),
        )

    async def _note(self, passed: Pass, refusal: StartRefusal | None, after: Sequence[Replica]) -> None:
        """Record what was decided and done, or complete what the pass recorded; between evaluations only if that is news."""
        deps, wall = self._deps, self._deps.clock.wall()
        outcome = _outcome(passed, refusal, after)
        decision = afterwards(passed.endpoint, outcome)
        news, last, self._last_news = sameness(decision), self._last_news, sameness(decision)
        recorded, question = passed.recorded, passed.question
        if passed.result is not None:
            decision = compose(passed.endpoint, passed.result.evaluation, outcome)
        elif recorded is None and (news == last or not (outcome.steps or self.waiting)):
            return
        if recorded is None:
            before = deps.repetitions.of(self._id)
            added = partial(
                decision_log.record,
                decision=decision,
                wall=wall,
                question=question,
                before=before,
                quiet=True,
            )
            recorded = await deps.store.write(added)
        elif after is not passed.live:
            key = recorded.times.decision
            amended = partial(decision_log.amend, decision_id=key, decision=decision, question=question)
            await deps.store.write(amended)
        deps.repetitions.note(recorded, decision, wall, question)
        if sameness(decision) != self._last_written:
            self._last_written = sameness(decision)
            deps.file.put(decision_log.shown(decision, recorded.times.decision, wall))

    def _pause(self, passed: Pass, refusal: StartRefusal | None, after: Sequence[Replica]) -> float:
        """Seconds until the next look; few where more replicas are to be decided than may wait at a time."""
        due = max(0.0, self._evaluation_due - self._deps.clock.now())
        pauses = [due]
        if passed.endpoint.deleting:
            pauses = [RETRY if after or passed.owing else AGAIN]
        if refusal is not None:
            pauses.append(refusal.retry_after)
        if passed.delay:
            pauses.append(passed.delay)
        staying = sum(one.aimed_at and not one.leaving for one in after)
        if not (refusal or passed.delay) and staying < passed.endpoint.desired:
            pauses.append(AGAIN)
        leaving = (one.revocation for one in after if one.leaving)
        pauses += [max(0.0, one.leave_at - self._deps.clock.now()) for one in leaving if one]
        return min(pauses)


def _found(
    connection: Connection, endpoint_id: str, known: Endpoint | None
) -> tuple[Endpoint | None, Sequence[Replica]]:
    """The endpoint, and those of its replicas that have not ended."""
    return store.endpoint(connection, endpoint_id, known), store.replicas(connection, endpoint_id)


def _outcome(passed: Pass, refusal: StartRefusal | None, after: Sequence[Replica]) -> DecisionOutcome:
    granted, steps = sum(one.granted for one in after), list(passed.outcome.steps)
    leased = [
        sum(one.granted and one.lease is not None for one in replicas) for replicas in (passed.live, after)
    ]
    if leased[1] > leased[0]:
        text = f"GPUs reserved for {leased[1] - leased[0]} more"
        steps.append(Step(Stage.GPU, Code.GRANTED, passed.outcome.granted, granted, text))
    if refusal is not None:
        text = refusal.text
        if times := [one.revocation.leave_time for one in after if one.leaving and one.revocation]:
            text = (
                f"{text.rstrip('.')}; those that will lose their GPUs work on until {clock_time(min(times))}"
            )
        steps.append(Step(refusal.stage, refusal.code, passed.endpoint.desired, granted, text))
    return DecisionOutcome(granted, tuple(steps))


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
        starts: whether replicas may start.
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
    starts: bool = True


@dataclass(frozen=True, slots=True)
class Pass:
    """What came of the transaction.

    Attributes:
        endpoint: as it stands now.
        question: what the rules went by; None where they were not read.
        result: what they came to.
        outcome: the replicas that have their GPUs, and what is to be done, before pending ones are acted on.
        live: replicas that have not ended, with those that were just decided.
        told: ids of adapters whose replicas were asked to stop.
        delay: seconds for which no replacement starts.
        recorded: the decision that was recorded with it, if one was; it is complete unless replicas are pending.
        owing: whether reservations of replicas that ended are still to be released.
    """

    endpoint: Endpoint
    question: Question | None
    result: Result | None
    outcome: DecisionOutcome
    live: Sequence[Replica]
    told: frozenset[str]
    delay: float
    recorded: Recorded | None
    owing: bool


def run_pass(connection: Connection, endpoint_id: str, facts: PassFacts) -> Pass | None:
    """Evaluate, plan and write; None where the endpoint is gone, or goes now that its last replica has."""
    before = store.endpoint(connection, endpoint_id, facts.endpoint)
    if before is None:
        return None
    replicas = _Replicas.read(connection, before, facts)
    if before.deleting and replicas.are_settled:
        store.remove_endpoint(connection, endpoint_id)
        store.remove_replicas(connection, endpoint_id)
        decision_log.remove_decisions(connection, endpoint_id)
        watcher_store.remove_readings(connection, endpoint_id)
        return None
    question = _question(connection, before, replicas, facts)
    endpoint, result = _evaluated(connection, before, question, facts)
    plans = _Plans.of(endpoint, replicas, facts)
    live = plans.write(connection, endpoint, replicas.rows, facts.at)
    outcome = DecisionOutcome(sum(one.granted for one in live), plans.steps(replicas))
    changed = plans.acts or endpoint is not before
    recorded = None
    if changed or (result and not any(one.state is ReplicaState.PENDING for one in live)):
        decision = compose(endpoint, result.evaluation, outcome) if result else afterwards(endpoint, outcome)
        recorded = decision_log.record(
            connection, decision, facts.at.wall, question, before=facts.repeated, quiet=not changed
        )
    return Pass(endpoint, question, result, outcome, live, plans.told, plans.delay, recorded, replicas.owing)


@dataclass(frozen=True, slots=True)
class _Replicas:
    """The replicas of an endpoint: all that are kept, those that have not ended, and the adapters that are silent."""

    kept: Sequence[Replica]
    rows: Sequence[Replica]
    silent: frozenset[str]

    @classmethod
    def read(cls, connection: Connection, endpoint: Endpoint, facts: PassFacts) -> _Replicas:
        """Read them; those that nobody was told of are asked to stop if the spec has another template by now.

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
        return cls(kept, rows, frozenset(one.adapter for one in rows if one.adapter) - facts.live)

    @property
    def owing(self) -> bool:
        """Whether reservations of some that ended are still to be released."""
        return any(one.owes_release for one in self.kept)

    @property
    def are_settled(self) -> bool:
        """Whether all have ended, and hold nothing."""
        return not self.rows and not self.owing


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
        gpu_limit=None if facts.room is None else secured(rows) + facts.room,
    )
    unknown = sum(one.adapter in replicas.silent for one in rows)
    return Question(endpoint.spec, inputs, Memory(facts.at.now) if memory is None else memory, unknown)


def _evaluated(
    connection: Connection, endpoint: Endpoint, question: Question | None, facts: PassFacts
) -> tuple[Endpoint, Result | None]:
    """The endpoint, aiming at what the rules come to; stored with the cooldowns that begin where that is another count."""
    if question is None:
        return endpoint, None
    result = asked(question)
    evaluation = result.evaluation
    sets = {one: count.wanted for one, count in evaluation.sets.items()}
    same_sets = not endpoint.spec.capability_sets or sets == endpoint.targets
    if evaluation.wanted == endpoint.desired and same_sets:
        return endpoint, result
    aimed = replace(endpoint, desired=evaluation.wanted, sets=sets)
    store.save_endpoint(connection, aimed)
    store.save_rule_changes(connection, endpoint.id, evaluation.effective, facts.at.now)
    return aimed, result


@dataclass(frozen=True, slots=True)
class _Plans:
    """The plan of each capability set, and seconds until one of it may start, for those that want to start some."""

    plans: Mapping[str, Plan]
    delays: Mapping[str, float]

    @classmethod
    def of(cls, endpoint: Endpoint, replicas: _Replicas, facts: PassFacts) -> _Plans:
        """What brings replicas closer to the count; those of another capability set have failures of their own."""
        spec, now = endpoint.spec, facts.at.now
        plans = plan_sets(endpoint.targets, replicas.rows, replicas.silent, spec, facts.busy, now)
        if not facts.starts:
            plans = {one: replace(planned, start=0) for one, planned in plans.items()}
        starting = [one for one, planned in plans.items() if planned.start]
        own = {one: [replica for replica in replicas.kept if replica.group.set == one] for one in starting}
        return cls(plans, {one: crash_delay(own[one], now) for one in starting})

    @property
    def stops(self) -> list[Replica]:
        """The replicas to stop."""
        return [victim for planned in self.plans.values() for victim in planned.stop]

    @property
    def told(self) -> frozenset[str]:
        """Ids of the adapters that run them."""
        return frozenset(one.adapter for one in self.stops if one.adapter)

    @property
    def acts(self) -> bool:
        """Whether a replica is to be stopped or started now."""
        return bool(self.stops) or not all(self.delays.values())

    @property
    def delay(self) -> float:
        """Seconds until the first may start of those that may not now; 0 where there is none."""
        return min(filter(None, self.delays.values()), default=0.0)

    def write(
        self, connection: Connection, endpoint: Endpoint, rows: Sequence[Replica], at: Moment
    ) -> tuple[Replica, ...]:
        """Write who stops and who starts; returns the replicas that have not ended after that."""
        stopped: dict[str, Replica] = {}
        for set_id, planned in self.plans.items():
            wanted = f"{endpoint.targets.get(set_id, 0)} {set_id or 'replicas'} are wanted"
            reason = "its endpoint is deleted" if endpoint.deleting else wanted
            for one in planned.stop:
                why = one.revocation.reason if one.revocation and not endpoint.deleting else reason
                stopped[one.id] = asked_to_stop(one, why, at)
        store.save_replicas(connection, stopped.values())
        started: list[Replica] = []
        for set_id, delay in self.delays.items():
            if not delay:
                started += [_decided(endpoint, set_id, at) for _ in range(self.plans[set_id].start)]
        for replica in started:
            store.add_replica(connection, replica)
        left = (stopped.get(one.id, one) for one in rows)
        return (*(one for one in left if not one.ended), *started)

    def steps(self, replicas: _Replicas) -> tuple[Step, ...]:
        """What is to be done, as steps of a decision."""
        steps: list[Step] = []

        def add(code: Code, count: int, after: int, text: str, set_id: str = "") -> None:
            steps.append(Step(Stage.ACT, code, count, after, text, capability_set=set_id))

        def place(one: Replica) -> str:
            return f"{one.id} on {adapter_name(one.adapter)}" if one.adapter else one.id

        rows, silent = replicas.rows, replicas.silent
        if silent:
            count = sum(one.aimed_at for one in rows)
            lost, names = sum(one.adapter in silent for one in rows), ", ".join(sorted(silent))
            text = f"{lost} replicas have not been heard of (adapters: {names}); nothing takes their place"
            add(Code.ADAPTER_LOST, count, count, text)
        for text in losses(rows):
            count = sum(one.aimed_at for one in rows)
            add(Code.REVOKED, count, count, text)
        for set_id, planned in self.plans.items():
            count, delay = (
                sum(one.aimed_at for one in rows if one.group.set == set_id),
                self.delays.get(set_id),
            )
            leaving = sum(one.leaving for one in rows if one.group.set == set_id)
            if planned.start and delay:
                text = f"replicas ended by themselves: the next one starts in {delay:.1f} s"
                add(Code.BACK_OFF, count, count, text, set_id)
            elif planned.start:
                text = f"starts {planned.start} more {set_id}".rstrip()
                text += f", {min(planned.start, leaving)} of them in place of those" if leaving else ""
                add(Code.START, count, count + planned.start, text, set_id)
            if planned.stop:
                text = f"asked to finish and stop: {', '.join(map(place, planned.stop))}"
                add(Code.STOP, count, count - len(planned.stop), text, set_id)
        return tuple(steps)


def _decided(endpoint: Endpoint, set_id: str, at: Moment) -> Replica:
    """A replica that is to start."""
    request_id = str(uuid4())
    asked_for = next((one for one in endpoint.spec.capability_sets if one.id == set_id), None)
    group = NO_GROUP
    if asked_for is not None:
        group = GroupOfReplica(set_id, WorkerGroup(asked_for.capabilities, asked_for.workers))
    template = endpoint.spec.of_set(set_id).started_from
    short = request_id.replace("-", "")[:12]  # an id as short as people can read
    return Replica(endpoint.id, short, request_id, template, at.wall, group=group)
