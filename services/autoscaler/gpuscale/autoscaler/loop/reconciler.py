"""Drives every endpoint towards its desired state: one loop each, level-triggered.

An endpoint is looked at when its tick is due, and at once when its spec, replicas or adapters changed, or when GPUs became
free. Rules are only evaluated at ticks and after changes of the spec. A failure of one endpoint is retried later, and stops no
other.

The core of a look is a pass: the new count, the cooldowns that it starts, the decision that explains it, and the resulting
intents are written in one transaction based on what is there then, or not at all. External actions follow only afterwards. A
pass is first tried on the last known state, without the store: usually it changes nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import NamedTuple, NoReturn, Self
from uuid import uuid4

from gpuscale.autoscaler.domain import planning
from gpuscale.autoscaler.domain.decisions import (
    Code,
    Decision,
    DecisionOutcome,
    Stage,
    Step,
    afterwards,
    compose,
    sameness,
)
from gpuscale.autoscaler.domain.engine import Memory, Question, Result, asked
from gpuscale.autoscaler.domain.inputs import (
    NO_GROUP,
    GiveWay,
    GroupOfReplica,
    Inputs,
    Observation,
    WorkerGroup,
)
from gpuscale.autoscaler.domain.precedence import yielding
from gpuscale.autoscaler.domain.replicas import EndReason, Moment, Replica, ReplicaState, asked_to_stop
from gpuscale.autoscaler.domain.signals import EndpointPast, Samples, noted
from gpuscale.autoscaler.domain.spec import Endpoint
from gpuscale.autoscaler.loop.hub import AdapterHub, Followers, Wake, Wakes
from gpuscale.autoscaler.loop.leases import AGAIN, Actor, LeaseKeeper
from gpuscale.autoscaler.loop.precedence import RETRY, Precedence, StartRefusal
from gpuscale.autoscaler.signals.sources import Histories, SignalSources, WatcherUses
from gpuscale.autoscaler.state import decision_log, store, watcher_store
from gpuscale.autoscaler.state.decision_log import Last, Recorded, Repetition, Repetitions
from gpuscale.autoscaler.state.store import Connection
from gpuscale.common.errors import GpuscaleError
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import Backoff, Clock, TaskScope
from gpuscale.common.store.store import Store

CONCURRENT = 16
"""Most endpoints that are looked at concurrently."""
LATE, LATE_EVERY = 1.0, 5.0
"""Seconds by which an evaluation is late enough to report, and between checks for that."""
KNOWN_FOR = 60.0
"""Seconds after which an endpoint is read again even without a change."""
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Dependencies:
    """Dependencies of a pass."""

    store: Store
    clock: Clock
    sources: SignalSources
    hub: AdapterHub
    actor: Actor
    keeper: LeaseKeeper
    uses: WatcherUses
    followers: Followers
    histories: Histories
    repetitions: Repetitions
    precedence: Precedence


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
        """The values of each signal of an endpoint at its evaluations, by id; nothing before the first."""
        loop = self._loops.get(endpoint_id)
        return loop.samples if loop is not None else {}

    def counts(self) -> Iterator[tuple[str, EndpointCounts, float]]:
        """Each endpoint's counts at its last look, and how many seconds its evaluation is late."""
        for endpoint_id, loop in sorted(self._loops.items()):
            if loop.counts is not None:
                yield endpoint_id, loop.counts, loop.lateness

    async def run(self) -> None:
        """Start with the stored endpoints; never ends."""
        known = await self._deps.store.read(every_found)
        for endpoint_id in known:
            self._wakes.call(endpoint_id, changed=False)
        async with TaskScope() as scope:
            scope.start("tell of late evaluations", self._tell_of_lateness())
            while True:
                endpoint_id, wake = await self._wakes.arrival()
                scope.start(
                    f"endpoint {endpoint_id}", self._keep(endpoint_id, wake, known.pop(endpoint_id, None))
                )

    async def _tell_of_lateness(self) -> NoReturn:
        """Log when evaluations begin to be late, and when they are on time again."""
        was_late = False
        while True:
            await asyncio.sleep(LATE_EVERY)
            late = [loop.lateness for loop in self._loops.values() if loop.counts and loop.lateness > LATE]
            if late and not was_late:
                most = round(max(late), 1)
                _log.warning(
                    "evaluations are late", endpoints=len(late), of=len(self._loops), most_seconds=most
                )
            elif was_late and not late:
                _log.info("evaluations are on time again", endpoints=len(self._loops))
            was_late = bool(late)

    async def _keep(self, endpoint_id: str, wake: Wake, known: Known | None) -> None:
        loop = self._loops[endpoint_id] = EndpointLoop(endpoint_id, self._deps, known)
        backoff = Backoff(initial=0.5, cap=10.0)
        wait = 0.0
        while True:
            await wake.wait(wait)
            wanted: float | None = None
            async with self._limit:
                with _Attempt() as attempt:
                    wanted = await loop.look(**wake.answer())
            self._deps.followers.looked(endpoint_id)
            if (error := attempt.error) is not None:
                traceback = None if isinstance(error, GpuscaleError) else error
                said = {"endpoint": endpoint_id, "error": str(error)}
                _log.warning("cannot reconcile an endpoint", **said, exc_info=traceback)
                wait = loop.until_next_leave(backoff.next())
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
            # It may have been created again meanwhile: the memory of the deleted one is not its past.
            loop = self._loops[endpoint_id] = EndpointLoop(endpoint_id, self._deps)


class _Attempt:
    """Contains a failure to its endpoint, so that the loops of others go on."""

    error: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.error = error if isinstance(error, Exception) else None
        return self.error is not None


class EndpointCounts(NamedTuple):
    """Replicas of an endpoint: wanted, with their GPUs, and ready; and how many seconds the next one waits, after failures."""

    desired: int
    granted: int
    ready: int
    back_off: float


class EndpointLoop:
    """What is remembered of one endpoint between two looks; all that matters is in the store.

    It is `waiting` if it lacks GPUs or an adapter; `counts` has its replicas at the last look.
    """

    def __init__(self, endpoint_id: str, deps: Dependencies, known: Known | None = None) -> None:
        self.past = EndpointPast()
        self.samples: Mapping[str, Samples] = {}
        self.waiting = False
        self.counts: EndpointCounts | None = None
        self._id = endpoint_id
        self._deps = deps
        self._evaluation_due = 0.0
        self._asked = True
        self._recalled = False
        self._last_news: tuple[str, int, str] | None = None
        self._granted = 0, 0.0
        self._leave_times: tuple[float, ...] = ()
        self._wanted: int | None = None
        self._known = known
        self._endpoint: Endpoint | None = None
        self._read_due = deps.clock.now() + KNOWN_FOR

    @property
    def lateness(self) -> float:
        """Seconds that its evaluation is late."""
        return max(0.0, self._deps.clock.now() - self._evaluation_due)

    def until_next_leave(self, pause: float) -> float:
        """Seconds until the next replica must finish, since its GPUs will be revoked; `pause` if that is less."""
        now = self._deps.clock.now()
        return min([pause, *(at - now for at in self._leave_times if at > now)])

    async def look(self, *, evaluate: bool, changed: bool) -> float | None:
        """Evaluate if due, or in any case with `evaluate`, act, and record the outcome.

        `changed`: whether what is on disk may have changed since the last look. Returns seconds until the next look; None once
        the endpoint is gone. Repeat the look after a GpuscaleError.
        """
        deps = self._deps
        self._asked = self._asked or evaluate or deps.clock.now() >= self._evaluation_due
        known, self._known = self._known, None
        if known is None or changed or deps.clock.now() >= self._read_due:
            self._read_due = deps.clock.now() + KNOWN_FOR
            self._endpoint = known.endpoint if known is not None else self._endpoint
            known = await deps.store.read(partial(read_known, endpoint_id=self._id, before=self._endpoint))
        if known is not None and not self._recalled:
            # What replicas carry was learned over days: it survives a restart.
            if any(rule.kind.learns for rule in known.endpoint.spec.rules):
                recalled = partial(decision_log.learnt, endpoint=self._id, now=deps.clock.now())
                self.past = EndpointPast(bursts=await deps.store.read(recalled))
            self._recalled = True
        facts = self._facts(known)
        passed = come_to(known, facts) if known is not None else None
        if passed is None or not passed.quiet:
            passed = await self._carry_out(facts, passed)
        wanted = passed.endpoint.desired if passed else None
        if wanted is None or wanted != self._wanted:
            self._wanted = wanted
            deps.followers.tell(self._id)
        if passed is None or passed.endpoint.deleting:  # no change for those that follow it
            deps.sources.aims.pop(self._id, None)
        else:
            deps.sources.aims[self._id] = passed.endpoint.desired
        if passed is None:
            return None
        spec = passed.endpoint.spec
        await deps.histories.note(self._id, spec, facts.at)
        if passed.result is not None:
            self.past = replace(facts.past, memory=passed.result.memory, bursts=passed.result.bursts)
            # An early tick restarts the schedule, late ones are not made up for.
            due = self._evaluation_due + spec.period
            on_time = self._evaluation_due <= facts.at.now < due
            self._asked, self._evaluation_due = False, due if on_time else facts.at.now + spec.period
            shown = passed.result.evaluation.observations
            self.samples = noted(self.samples, shown, facts.at.wall.timestamp())
        await deps.hub.refresh(passed.told)
        refusal, after, preempts, spilled = None, passed.live, list[Step](), dict[str, str]()
        if passed.pending:
            try:
                refusal = await deps.actor.act(passed.live, passed.endpoint, spilled)
            finally:
                deps.keeper.changed()
            after = await deps.store.read(lambda connection: store.replicas(connection, self._id))
            preempts = await deps.precedence.claim(passed.endpoint, refusal, after)
        elif passed.owing:
            deps.keeper.changed()
        self.waiting = refusal is not None
        if not await self._note(passed, refusal, after, preempts, spilled):
            self._known = passed.known
        granted, ready = (one.granted for one in after), (one.state is ReplicaState.READY for one in after)
        self.counts = EndpointCounts(passed.endpoint.desired, sum(granted), sum(ready), passed.delay)
        return self._pause(passed, refusal, after)

    async def _carry_out(self, facts: PassFacts, tried: Pass | None) -> Pass | None:
        """Make the pass on what is on disk, and write the result."""
        work = partial(run_pass, endpoint_id=self._id, facts=facts, tried=tried)
        goes = tried is not None and tried.endpoint.deleting
        if tried is not None and tried.gone:  # whoever sees that it is gone may delete its watchers
            self._deps.uses.set(self._id, frozenset())
        try:
            return await self._deps.store.write(work, frees=goes)
        except GpuscaleError as error:
            if tried is not None and tried.gone:
                self._deps.uses.set(self._id, tried.endpoint.spec.watchers)
            elif error.reason == "DISK_FULL":
                # Stops free space; and replicas that will lose their GPUs must not run until there is some.
                only = replace(facts, evaluate=False, starts=False)
                work = partial(run_pass, endpoint_id=self._id, facts=only)
                if (passed := await self._deps.store.write(work, frees=True)) is not None:
                    await self._deps.hub.refresh(passed.told)
            raise

    def _facts(self, known: Known | None) -> PassFacts:
        """The inputs of the pass; the pass itself finds out whether the endpoint is there."""
        deps = self._deps
        at = Moment(deps.clock.now(), deps.clock.wall())
        if known is None:
            return PassFacts(at, self.past, evaluate=self._asked, repeated=deps.repetitions.of(self._id))
        endpoint, replicas = known.endpoint, known.replicas
        deps.sources.keep(endpoint.id, replicas)
        granted = sum(one.granted for one in replicas)
        if granted != self._granted[0]:
            self._granted = granted, at.now
        leaving = (one.revocation for one in replicas if one.leaving)
        self._leave_times = tuple(one.leave_at for one in leaving if one)
        facts = gathered(deps, known, self.past, at, evaluate=self._asked, since=self._granted[1])
        self.past = facts.past
        return facts

    async def _note(
        self,
        passed: Pass,
        refusal: StartRefusal | None,
        after: Sequence[Replica],
        preempts: Sequence[Step],
        spilled: Mapping[str, str],
    ) -> bool:
        """Record what was decided and done, or complete the pass's record; between evaluations only if that is news.

        Returns whether the endpoint on disk changed since the pass.
        """
        deps, wall = self._deps, self._deps.clock.wall()
        acted = refusal is not None or after is not passed.live
        outcome = passed.outcome
        if acted:
            granted, steps = sum(one.granted for one in after), list(outcome.steps)
            leased = [
                sum(one.granted and one.lease is not None for one in has) for has in (passed.live, after)
            ]
            if leased[1] > leased[0]:
                text = f"GPUs reserved for {leased[1] - leased[0]} more"
                steps.append(Step(Stage.GPU, Code.GRANTED, outcome.granted, granted, text))
            less = Counter(spilled[one.id] for one in after if one.lease is not None and one.id in spilled)
            for text, count in less.items():
                steps.append(Step(Stage.GPU, Code.SPILLED, granted, granted, f"{count} {text}"))
            if refusal is not None:
                text = refusal.text
                if times := [one.revocation.leave_time for one in after if one.leaving and one.revocation]:
                    until = planning.clock_time(min(times))
                    text = f"{text.rstrip('.')}; those that will lose their GPUs work on until {until}"
                text = "; ".join([*(one.text for one in preempts), text])
                desired = passed.endpoint.desired
                steps += [*preempts, Step(refusal.stage, refusal.code, desired, granted, text)]
            outcome = DecisionOutcome(granted, tuple(steps))
        endpoint, recorded, question = passed.endpoint, passed.recorded, passed.question
        news, last = (endpoint.etag, endpoint.desired, outcome.said), self._last_news
        self._last_news = news
        unasked = passed.result is None and recorded is None
        if unasked and (news == last or not (outcome.steps or self.waiting)):
            return acted
        decision = passed.decision
        if acted or decision is None:
            result = passed.result
            decision = (
                compose(endpoint, result.evaluation, outcome) if result else afterwards(endpoint, outcome)
            )
        if recorded is None:
            before, acted = deps.repetitions.of(self._id), True
            added = partial(
                decision_log.record,
                decision=decision,
                wall=wall,
                question=question,
                before=before,
                quiet=True,
            )
            recorded = await deps.store.write(added)
        elif acted:
            key = recorded.times.decision
            amended = partial(decision_log.amend, decision_id=key, decision=decision, question=question)
            await deps.store.write(amended)
        deps.repetitions.note(recorded, decision, wall, question)
        return acted

    def _pause(self, passed: Pass, refusal: StartRefusal | None, after: Sequence[Replica]) -> float:
        """Seconds until the next look; few if more replicas remain to be decided than may wait at a time."""
        pauses = [max(0.0, self._evaluation_due - self._deps.clock.now())]
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


@dataclass(frozen=True, slots=True)
class Known:
    """An endpoint on disk: all its stored replicas, when its rules last changed the count, and its last decision."""

    endpoint: Endpoint
    kept: Sequence[Replica]
    changes: Mapping[str, float]
    last: Last | None

    @property
    def replicas(self) -> Sequence[Replica]:
        """Those that have not ended."""
        return [one for one in self.kept if not one.ended]


def read_known(connection: Connection, endpoint_id: str, before: Endpoint | None) -> Known | None:
    """The state of an endpoint; None if there is none. Its spec is reused from `before` if that has the same etag."""
    endpoint = store.endpoint(connection, endpoint_id, before)
    if endpoint is None:
        return None
    return Known(
        endpoint,
        store.replicas_of(connection, endpoint_id),
        store.rule_changes(connection, endpoint_id),
        decision_log.last(connection, endpoint_id),
    )


def every_found(connection: Connection) -> dict[str, Known]:
    """The state of every endpoint, by its id."""
    each = ((one.id, read_known(connection, one.id, one)) for one in store.endpoints(connection))
    return {endpoint_id: known for endpoint_id, known in each if known is not None}


@dataclass(frozen=True, slots=True)
class PassFacts:
    """Inputs of a pass that are not on disk, gathered before its transaction."""

    at: Moment
    past: EndpointPast
    evaluate: bool  # whether rules are evaluated, or only the wanted number is acted on
    repeated: Repetition | None  # its last decision, if more is known of it than is on disk
    live: frozenset[str] = frozenset()  # ids of its live adapters
    observations: Mapping[str, Observation] = field(default_factory=dict[str, Observation])
    endpoint: Endpoint | None = None  # the endpoint when the readings were gathered
    busy: Mapping[str, float] = field(default_factory=dict[str, float])
    room: int | None = None  # how many more replicas there are GPUs for, if that was asked
    starts: bool = True  # whether replicas may start
    gives_way: GiveWay | None = None  # None if nobody of higher priority lacks GPUs

    def reads_rules(self, endpoint: Endpoint) -> bool:
        """Whether rules are evaluated: a spec that changed since its signals were read waits for the next pass."""
        same = self.endpoint is not None and self.endpoint.etag == endpoint.etag
        return self.evaluate and same and not endpoint.deleting


@dataclass(frozen=True, slots=True)
class Pass:
    """The result of a pass."""

    known: Known  # the state on disk after writing
    endpoint: Endpoint  # the endpoint after it
    question: Question | None  # the rules' inputs, if they were evaluated
    result: Result | None
    outcome: DecisionOutcome  # before pending replicas are acted on
    live: Sequence[Replica]  # those that have not ended, including new ones
    told: frozenset[str]  # ids of adapters whose replicas were asked to stop
    delay: float  # seconds for which no replacement starts
    owing: bool  # whether reservations of ended replicas are still to be released
    changed: Sequence[Replica]  # replicas to update
    started: Sequence[Replica]  # replicas to insert
    decision: Decision | None  # what to record; complete unless replicas are pending
    recorded: Recorded | None  # its record, if it has one already
    gone: bool  # whether the endpoint is removed, after its last replica

    @property
    def pending(self) -> bool:
        """Whether replicas are to be acted on."""
        return any(one.state is ReplicaState.PENDING for one in self.live)

    @property
    def acts(self) -> bool:
        """Whether it changes the wanted count, or orders of replicas."""
        return bool(self.changed or self.started) or self.endpoint is not self.known.endpoint

    @property
    def quiet(self) -> bool:
        """Whether there is nothing to write."""
        forgets = len(self.known.kept) - len(self.live) > store.KEPT
        return not (self.acts or self.gone or forgets) and (
            self.decision is None or self.recorded is not None
        )


def gathered(
    deps: Dependencies, known: Known, past: EndpointPast, at: Moment, *, evaluate: bool, since: float = 0.0
) -> PassFacts:
    """The inputs of a pass now, for a known state; `since`: when the last replica got GPUs."""
    endpoint, replicas = known.endpoint, known.replicas
    samples = deps.sources.sample(endpoint, replicas)
    past, given = past.with_samples(endpoint.spec, samples), deps.precedence.given.get(endpoint.id)
    return PassFacts(
        at=at,
        past=past,
        evaluate=evaluate,
        live=frozenset(filter(deps.hub.live, {one.adapter for one in replicas})),
        observations=past.observations(endpoint.spec, samples, at.now),
        endpoint=endpoint,
        busy=deps.sources.busy(endpoint),
        room=deps.sources.more(endpoint.spec, deps.hub.facts, since),
        repeated=deps.repetitions.of(endpoint.id),
        gives_way=given.way(at.now) if given else None,
    )


def run_pass(
    connection: Connection, endpoint_id: str, facts: PassFacts, tried: Pass | None = None
) -> Pass | None:
    """Evaluate, plan and write; None if the endpoint is gone, or is removed now after its last replica.

    `tried`: the result for these facts on the last known state; it is used if that is what is on disk.
    """
    known = read_known(connection, endpoint_id, facts.endpoint)
    if known is None:
        return None
    passed = tried if tried is not None and tried.known == known else come_to(known, facts)
    known = passed.known
    if passed.gone and passed is tried:  # else in the next one, once its watchers are free
        store.remove_endpoint(connection, endpoint_id)
        store.remove_replicas(connection, endpoint_id)
        decision_log.remove_decisions(connection, endpoint_id)
        watcher_store.remove_readings(connection, endpoint_id)
        return None
    if passed.endpoint is not known.endpoint and passed.result is not None:
        store.save_endpoint(connection, passed.endpoint)
        store.save_rule_changes(connection, endpoint_id, passed.result.evaluation.effective, facts.at.now)
    store.save_replicas(connection, passed.changed)
    for replica in passed.started:
        store.add_replica(connection, replica)
    if len(known.kept) - len(known.replicas) > store.KEPT:
        store.prune(connection, endpoint_id)
    recorded = passed.recorded
    if passed.decision is not None:
        wall, before = facts.at.wall, facts.repeated
        recorded = decision_log.record(
            connection, passed.decision, wall, passed.question, before=before, quiet=not passed.acts
        )
    return replace(
        passed, known=read_known(connection, endpoint_id, passed.endpoint) or known, recorded=recorded
    )


def come_to(known: Known, facts: PassFacts) -> Pass:
    """The result for a known state. Pure, so that it can be tried.

    Replicas that no adapter was told of are asked to stop if the spec has another template by now: nobody may have the old one,
    and they would block their replacements.
    """
    before, changed = known.endpoint, dict[str, Replica]()
    for one in known.replicas:
        spec = before.spec.of_set(one.group.set)
        if one.state is ReplicaState.PENDING and not one.template.is_of(spec.started_from):
            reason, why = "its endpoint has another template by now", EndReason.TEMPLATE_CHANGED
            changed[one.id] = asked_to_stop(one, reason, facts.at, why=why)
    way = facts.gives_way if facts.reads_rules(before) else None
    given = [] if way is None else yielding(way, before.spec, known.replicas)
    for one in given:
        reason = f"gives way to {way.to}" if way else ""
        changed[one.id] = asked_to_stop(one, reason, facts.at, why=EndReason.PREEMPTED)
    kept = [changed.get(one.id, one) for one in known.kept] if changed else known.kept
    rows = [one for one in kept if not one.ended]
    silent = frozenset(one.adapter for one in rows if one.adapter) - facts.live
    owing = any(one.owes_release for one in kept)
    question = question_of(known, kept, rows, silent, facts) if facts.reads_rules(before) else None
    endpoint, result = before, None if question is None else asked(question)
    if result is not None:
        wanted, sets = result.evaluation.wanted, result.evaluation.sets
        counts = {one: count.wanted for one, count in sets.items()}
        if wanted != before.desired or (before.spec.capability_sets and counts != before.targets):
            endpoint = replace(before, desired=wanted, sets=counts)
    plans = planning.Plans.of(endpoint, kept, rows, silent, facts.busy, facts.at.now, starts=facts.starts)
    stopped = plans.stopped(endpoint, facts.at)
    now = [set_id for set_id, delay in plans.delays.items() if not delay]
    started = [_decided(endpoint, one, facts.at) for one in now for _ in range(plans.plans[one].start)]
    live = [one for one in (stopped.get(one.id, one) for one in rows) if not one.ended] + started
    outcome = DecisionOutcome(sum(one.granted for one in live), plans.steps(kept, silent, given))
    acts = plans.acts or endpoint is not before or bool(given)
    decision, recorded = None, None
    if acts or (result and not any(one.state is ReplicaState.PENDING for one in live)):
        decision = compose(endpoint, result.evaluation, outcome) if result else afterwards(endpoint, outcome)
        if not acts:
            recorded = decision_log.repeated(known.last, sameness(decision), facts.repeated)
    return Pass(
        known=known,
        endpoint=endpoint,
        question=question,
        result=result,
        outcome=outcome,
        live=live,
        told=plans.told.union(one.adapter for one in given),
        delay=plans.delay,
        owing=owing,
        changed=list((changed | stopped).values()),
        started=started,
        decision=decision,
        recorded=recorded,
        gone=before.deleting and not rows and not owing,
    )


def question_of(
    known: Known, kept: Sequence[Replica], rows: Sequence[Replica], silent: frozenset[str], facts: PassFacts
) -> Question:
    """The inputs of the rules; `rows` are those of `kept` that have not ended, `silent` ids of adapters."""
    endpoint, memory = known.endpoint, facts.past.memory
    inputs = Inputs(
        before=endpoint.desired,
        ready=sum(one.state is ReplicaState.READY for one in rows),
        now=facts.at.now,
        wall=facts.at.wall,
        observations=facts.observations,
        series=facts.past.series,
        last_changes=known.changes,
        bursts=facts.past.bursts,
        startup=planning.startup_seconds(kept, facts.at),
        sets=planning.set_states(endpoint, kept, facts.at.now, facts.busy),
        gpu_limit=None if facts.room is None else planning.secured(rows) + facts.room,
        gives_way=facts.gives_way,
        capacity=planning.capacity_of(endpoint.spec, rows, facts.busy),
    )
    unknown = sum(one.adapter in silent for one in rows)
    return Question(endpoint.spec, inputs, Memory(facts.at.now) if memory is None else memory, unknown)


def _decided(endpoint: Endpoint, set_id: str, at: Moment) -> Replica:
    request_id = str(uuid4())
    asked_for = next((one for one in endpoint.spec.capability_sets if one.id == set_id), None)
    group = NO_GROUP
    if asked_for is not None:
        group = GroupOfReplica(set_id, WorkerGroup(asked_for.capabilities, asked_for.workers))
    template = endpoint.spec.of_set(set_id).started_from
    short = request_id.replace("-", "")[:12]  # a short id for people
    return Replica(endpoint.id, short, request_id, template, at.wall, group=group)
