"""Drives every endpoint towards what is wanted of it: one loop each, by level and not by edge.

An endpoint is looked at when its tick is due, and at once when its spec, its replicas or its adapters changed, or when
GPUs became free. Rules are read at ticks and after changes of the spec only. Whatever fails for one endpoint is tried
again later, and stops no other.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

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
from gpuscale.autoscaler.domain.inputs import Observation
from gpuscale.autoscaler.domain.replicas import Moment, Replica, ReplicaState
from gpuscale.autoscaler.domain.signals import EndpointPast, Samples, noted
from gpuscale.autoscaler.domain.spec import Endpoint
from gpuscale.autoscaler.loop.acting import AGAIN, RETRY, Actor, StartRefusal
from gpuscale.autoscaler.loop.hub import AdapterHub
from gpuscale.autoscaler.loop.leases import LeaseKeeper
from gpuscale.autoscaler.loop.passes import Pass, PassFacts, run_pass
from gpuscale.autoscaler.loop.wakes import Followers, Wake, Wakes, WatcherUses
from gpuscale.autoscaler.signals.histories import Histories
from gpuscale.autoscaler.signals.sources import SignalSources
from gpuscale.autoscaler.state import decision_log, store
from gpuscale.autoscaler.state.decision_log import DecisionFile, Repetitions
from gpuscale.autoscaler.state.store import Connection
from gpuscale.common.errors import GpuscaleError
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


class EndpointLoop:
    """What is remembered of one endpoint between two looks; all that matters is in the store."""

    def __init__(self, endpoint_id: str, deps: Dependencies) -> None:
        self.waiting = False
        self.samples: Mapping[str, Samples] = {}
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
