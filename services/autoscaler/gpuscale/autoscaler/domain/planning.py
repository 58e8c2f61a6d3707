"""Which replicas to start and stop, and which adapter gets them. Pure.

Silent replicas (their adapter has not been heard of) count as running when starting others, so they are not replaced, and as
not running when stopping others: whatever their state, enough are left.

Replicas that will lose their GPUs (a drain of their node) do not count towards the wanted number: others are started in their
place, beyond `max_replicas` while both run, and each stops once another is ready, or at its deadline.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from types import MappingProxyType

from gpuscale.autoscaler.domain.decisions import Code, Stage, Step
from gpuscale.autoscaler.domain.inputs import Amounts, ReplicaWeights, SetState, WorkerGroup, covers, in_words
from gpuscale.autoscaler.domain.replicas import EndReason, Goal, Moment, Replica, ReplicaState, asked_to_stop
from gpuscale.autoscaler.domain.spec import Endpoint, EndpointSpec, ReplicaTemplate, ScaleInOrder
from gpuscale.common.names import adapter_name
from gpuscale.common.sizes import counted

MAX_PENDING = 32
"""Most replicas of one endpoint that wait for GPUs or an adapter at a time; more would wait behind them anyway."""
FIRST_BACK_OFF = 1.0
LONGEST_BACK_OFF = 60.0
BELIEVED = 600.0
"""Seconds after its end for which a group with other capabilities than requested represents its set."""
HEALTHY = 60.0
"""Seconds of being ready after which a failure starts a new count."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Actions that bring the replicas closer to the wanted number; `held` stops wait for silent adapters."""

    start: int = 0
    stop: tuple[Replica, ...] = ()
    held: int = 0


def plan(
    wanted: int,
    replicas: Iterable[Replica],
    silent: Collection[str],
    spec: EndpointSpec,
    busy: Mapping[str, float],
    now: float,
) -> Plan:
    """Compare the existing replicas with the wanted number; `now` decides whose deadline has passed.

    Victims, in this order: those that no adapter was told of, the last tier, the least preferred GPU model, starting, leaving
    anyway, the least busy, newest. With OLDEST_FIRST, as in OpenGRIS Scaler, after tier and model: the least busy (starting and
    leaving ones have nothing in hand), the first started. `silent` holds the ids of silent adapters; `spec` has tiers and
    order; `busy` tells how busy replicas are, by id: an unknown one may be as busy as any.
    """
    everyone = [replica for replica in replicas if replica.aimed_at]
    aimed_at = [replica for replica in everyone if not replica.leaving]
    leaving = victims((one for one in everyone if one.leaving), spec, busy)
    pending = [replica for replica in aimed_at if replica.state is ReplicaState.PENDING]
    if (excess := len(aimed_at) - wanted) <= 0:
        found = Plan(start=min(-excess, max(0, MAX_PENDING - len(pending))))
    else:
        # At 0, too few cannot be left: silent ones are told to stop when they are heard of.
        passed_over = silent if wanted else ()
        known = [replica for replica in aimed_at if replica.adapter and replica.adapter not in passed_over]
        cancelled = _newest_first(pending)[:excess]
        spare = min(excess - len(cancelled), max(0, len(known) - wanted))
        stopping = (*cancelled, *victims(known, spec, busy)[:spare])
        found = Plan(stop=stopping, held=excess - len(stopping))
    if not leaving:
        return found
    stopped = {one.id for one in found.stop}
    staying = (one for one in aimed_at if one.id not in stopped and one.adapter not in silent)
    ready = sum(one.state is ReplicaState.READY for one in staying)
    replaced = max(0, len(leaving) - max(0, wanted - ready))
    # Silent ones may not serve, so they are the first to be replaced.
    in_order = sorted(leaving, key=lambda one: one.adapter not in silent)
    late = (one for one in in_order[replaced:] if one.revocation and one.revocation.leave_at <= now)
    return replace(found, stop=(*found.stop, *in_order[:replaced], *late))


def secured(replicas: Iterable[Replica]) -> int:
    """How many have GPUs that nobody will revoke."""
    return sum(one.granted and not one.leaving for one in replicas)


def clock_time(moment: datetime) -> str:
    """Such as `14:03:59 UTC`."""
    return f"{moment:%H:%M:%S} UTC"


def losses(replicas: Iterable[Replica]) -> list[str]:
    """Which replicas will lose their GPUs: one text per reason."""
    told = (
        (one.revocation.reason, one.revocation.time) for one in replicas if one.leaving and one.revocation
    )
    texts: list[str] = []
    for reason, found in groupby(sorted(told), key=itemgetter(0)):
        times = [time for _, time in found]
        whose = counted(len(times), "replica loses its", "replicas lose their")
        texts.append(f"{whose} GPUs at {clock_time(times[0])}: {reason}")
    return texts


def set_states(
    endpoint: Endpoint, kept: Sequence[Replica], now: float, busy: Mapping[str, float]
) -> dict[str, SetState]:
    """The state of each capability set of an endpoint; `kept` are its replicas, including ended ones."""
    spec, targets = endpoint.spec, endpoint.targets
    found: dict[str, SetState] = {}
    for one in spec.capability_sets:
        own = [replica for replica in kept if replica.group.set == one.id]
        aimed = [replica for replica in own if replica.aimed_at and not replica.leaving]
        groups = tuple(replica.group.actual for replica in _first_to_stop(aimed, spec.of_set(one.id), busy))
        # What the newest group of a request reports instead of what was asked; also for a while after its end.
        told = (
            replica.group.reported.capabilities
            for replica in _newest_first(own)
            if replica.group.reported is not None
            and (not replica.ended or (replica.ended_at is not None and now - replica.ended_at < BELIEVED))
            and replica.group.asked.capabilities == one.capabilities
        )
        reported = next(told, None)
        found[one.id] = SetState(targets[one.id], groups, None if reported == one.capabilities else reported)
    return found


def _first_to_stop(aimed: Sequence[Replica], spec: EndpointSpec, busy: Mapping[str, float]) -> list[Replica]:
    pending = [replica for replica in aimed if replica.state is ReplicaState.PENDING]
    told = [replica for replica in aimed if replica.state is not ReplicaState.PENDING]
    return [*_newest_first(pending), *victims(told, spec, busy)]


def capacity_of(
    spec: EndpointSpec, replicas: Sequence[Replica], busy: Mapping[str, float]
) -> ReplicaWeights | None:
    """The weights of an endpoint's replicas; None if each counts as one."""
    template = spec.template
    if not template.models:
        return None
    aimed = [one for one in replicas if one.aimed_at and not one.leaving]
    # While the newest starts, the model it got is what is available.
    newest = next((one for one in _newest_first(aimed) if one.state is not ReplicaState.PENDING), None)
    starts = newest is not None and newest.state is ReplicaState.STARTING
    following = template.weight(newest.template) if newest and starts else template.models[0].weight
    weights = [
        following if one.state is ReplicaState.PENDING else template.weight(one.template)
        for one in _first_to_stop(aimed, spec, busy)
    ]
    ready = [template.weight(one.template) for one in replicas if one.state is ReplicaState.READY]
    return ReplicaWeights(tuple(weights), following, math.fsum(ready) / len(ready) if ready else following)


def _newest_first(replicas: Iterable[Replica]) -> list[Replica]:
    return sorted(replicas, key=lambda replica: (replica.create_time, replica.id), reverse=True)


_STOPS_FIRST = {ReplicaState.STARTING: 0, ReplicaState.DRAINING: 1}


def victims(replicas: Iterable[Replica], spec: EndpointSpec, busy: Mapping[str, float]) -> list[Replica]:
    """Replicas in the order in which they are stopped: see `plan`."""
    oldest_first = spec.scale_in_order is ScaleInOrder.OLDEST_FIRST

    def order(replica: Replica) -> tuple[int, int, int, float]:
        tier = spec.template.tier(replica.adapter)
        behind = -tier if tier is not None else -max(1, len(spec.template.tiers))
        state = _STOPS_FIRST.get(replica.state, len(_STOPS_FIRST))
        in_hand = 0.0 if replica.state in _STOPS_FIRST else busy.get(replica.id, math.inf)
        preferred = -spec.template.place(replica.template)
        return behind, preferred, 0 if oldest_first else state, in_hand

    newest = _newest_first(replicas)
    return sorted(reversed(newest) if oldest_first else newest, key=order)


def crash_delay(replicas: Iterable[Replica], now: float) -> float:
    """Seconds until a replacement may start after replicas failed: 1 s doubling to 60 s.

    A replica that was ready for 60 s before it failed starts a new count, and so does a failure so late that the endpoint was
    well in between. Failures within a second count once: a fault that hits all replicas says no more than one that hits a
    single one.
    """
    failures = sorted(
        (
            (replica.ended_at, replica.ready_at)
            for replica in replicas
            if replica.state is ReplicaState.FAILED
            and replica.goal is Goal.RUN
            and replica.ended_at is not None
        ),
        key=itemgetter(0),
        reverse=True,
    )
    count, later = 0, math.inf
    for ended_at, ready_at in failures:
        if count and later - ended_at > LONGEST_BACK_OFF + HEALTHY:
            break
        count += later - ended_at >= FIRST_BACK_OFF
        later = ended_at
        if ready_at is not None and ended_at - ready_at >= HEALTHY:
            break
    if not count:
        return 0.0
    return max(0.0, failures[0][0] + min(LONGEST_BACK_OFF, FIRST_BACK_OFF * 2.0 ** (count - 1)) - now)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Capabilities of an adapter beyond starting and stopping replicas."""

    # its engine assigns GPUs itself: replicas take no reservation, and it may have no node
    gives_gpus: bool = False
    picks_victims: bool = True  # it can stop a given replica
    drains: bool = True  # a replica is asked to finish its work, within its drain timeout
    probes: bool = False  # READY means that a replica was checked, not only that it runs
    logs: bool = False  # it can read replicas' logs


DEFAULT_CAPABILITIES = Capabilities()


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """An adapter's description of itself, and whether it is connected (`live`). `max_replicas` 0: no limit.

    `workers`: what the workers of its templates can do, if it says so.
    """

    id: str
    kind: str
    node: str
    templates: frozenset[str]
    max_replicas: int
    live: bool
    capabilities: Capabilities = DEFAULT_CAPABILITIES
    workers: Mapping[str, WorkerGroup] = field(default_factory=dict[str, WorkerGroup])
    version: str = ""

    def offers(self, template: str, needs: Amounts) -> bool:
        """Whether workers of its template offer this, as far as it says what they offer."""
        return template not in self.workers or covers(self.workers[template].capabilities, needs)

    def serves(self, template: ReplicaTemplate) -> bool:
        """Whether it has the GPUs that a replica needs: those of its node, or its engine's own."""
        return template.gpu_count == 0 or bool(self.node) or self.capabilities.gives_gpus


NO_LOADS: Mapping[str, int] = MappingProxyType({})


def candidates(
    template: ReplicaTemplate,
    adapters: Sequence[AdapterFacts],
    loads: Mapping[str, int],
    own: Mapping[str, int] = NO_LOADS,
    needs: Amounts = NO_LOADS,
) -> list[AdapterFacts]:
    """Adapters that can run a replica of `template`, by tier, then fewest replicas, then id.

    `loads` holds the replicas of each adapter, `own` those of the endpoint alone; `needs`: what its workers must offer. GPUs
    need an adapter that is bound to a node, or whose engine assigns them.
    """
    most = {tier.adapter: tier.max_replicas for tier in template.tiers}
    places = {adapter.id: template.tier(adapter.id) for adapter in adapters}
    able = [
        adapter
        for adapter in adapters
        if adapter.live
        and template.template in adapter.templates
        and places[adapter.id] is not None
        and adapter.serves(template)
        and adapter.offers(template.template, needs)
        and _room(adapter.max_replicas, loads.get(adapter.id, 0))
        and _room(most.get(adapter.id, 0), own.get(adapter.id, 0))
    ]
    return sorted(able, key=lambda one: (places[one.id] or 0, loads.get(one.id, 0), one.id))


def nodes_of(template: ReplicaTemplate, adapters: Sequence[AdapterFacts]) -> set[str]:
    """Nodes whose GPUs replicas of `template` can reserve, however many replicas they have."""
    able = candidates(template, adapters, NO_LOADS)
    return {one.node for one in able if one.node and not one.capabilities.gives_gpus}


def gpus_elsewhere(template: ReplicaTemplate, adapters: Sequence[AdapterFacts]) -> bool:
    """Whether an engine that assigns GPUs itself can run replicas of `template`: their number is unknown here."""
    return any(one.capabilities.gives_gpus for one in candidates(template, adapters, NO_LOADS))


def _room(most: int, count: int) -> bool:
    return most == 0 or count < most


def by_tier(template: ReplicaTemplate, able: Iterable[AdapterFacts]) -> list[list[AdapterFacts]]:
    """Candidates grouped by tier, for tiers that have any, to try in order."""
    return [list(group) for _, group in groupby(able, key=lambda adapter: template.tier(adapter.id))]


def nobody(template: ReplicaTemplate, adapters: Sequence[AdapterFacts], needs: Amounts = NO_LOADS) -> str:
    """Why no adapter can run a replica of `template`."""
    able = [one for one in adapters if one.live and template.tier(one.id) is not None]
    if not able:
        wanted = ", ".join(template.adapters)
        return f"adapter {wanted} is not connected" if wanted else "no adapter is connected"
    able = [adapter for adapter in able if template.template in adapter.templates]
    if not able:
        return f"no adapter that is connected has the template {template.template}"
    if not any(adapter.serves(template) for adapter in able):
        return f"no adapter with the template {template.template} is bound to a node, whose GPUs it could use"
    if not any(adapter.offers(template.template, needs) for adapter in able):
        return f"no adapter with the template {template.template} offers {in_words(needs)}"
    return f"the adapters with the template {template.template} run the maximum number of replicas"


def startup_seconds(replicas: Iterable[Replica], at: Moment) -> float | None:
    """Median seconds from the decision to ready, over the known replicas; None if none was ready.

    This includes waiting for GPUs: a forecast has to look beyond that too.
    """
    took = sorted(
        max(0.0, at.wall.timestamp() - (at.now - one.ready_at) - one.create_time.timestamp())
        for one in replicas
        if one.ready_at is not None
    )
    return took[len(took) // 2] if took else None


@dataclass(frozen=True, slots=True)
class Plans:
    """The plan of each capability set, and seconds until one of it may start, for those that want to start some."""

    plans: Mapping[str, Plan]
    delays: Mapping[str, float]

    @classmethod
    def of(
        cls,
        endpoint: Endpoint,
        kept: Sequence[Replica],
        rows: Sequence[Replica],
        silent: frozenset[str],
        busy: Mapping[str, float],
        now: float,
        *,
        starts: bool,
    ) -> Plans:
        """Plan for the replicas that have not ended (`rows`), also for sets that only they still belong to."""
        members: dict[str, list[Replica]] = {one: [] for one in endpoint.targets}
        for replica in rows:
            members.setdefault(replica.group.set, []).append(replica)
        plans = {
            one: plan(endpoint.targets.get(one, 0), of_set, silent, endpoint.spec.of_set(one), busy, now)
            for one, of_set in members.items()
        }
        if not starts:
            plans = {one: replace(planned, start=0) for one, planned in plans.items()}
        starting = [one for one, planned in plans.items() if planned.start]
        own = {one: [replica for replica in kept if replica.group.set == one] for one in starting}
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
        """Seconds until the first delayed start; 0 if none is delayed."""
        return min(filter(None, self.delays.values()), default=0.0)

    def stopped(self, endpoint: Endpoint, at: Moment) -> dict[str, Replica]:
        """The replicas to stop, marked as such, by id."""
        found: dict[str, Replica] = {}
        for set_id, planned in self.plans.items():
            wanted = f"{endpoint.targets.get(set_id, 0)} {set_id or 'replicas'} are wanted"
            reason = "its endpoint is deleted" if endpoint.deleting else wanted
            for one in planned.stop:
                told, why = reason, EndReason.ENDPOINT_DELETED if endpoint.deleting else EndReason.SCALED_IN
                if one.revocation and not endpoint.deleting:
                    told, why = one.revocation.reason, EndReason.REVOKED
                found[one.id] = asked_to_stop(one, told, at, why=why)
        return found

    def steps(
        self, kept: Sequence[Replica], silent: frozenset[str], given: Sequence[Replica] = ()
    ) -> tuple[Step, ...]:
        """The actions, as steps of a decision; `given`: those that stop to give way, which are not in the plans."""
        steps, rows = list[Step](), [one for one in kept if not one.ended]

        def add(code: Code, count: int, after: int, text: str, set_id: str = "") -> None:
            steps.append(Step(Stage.ACT, code, count, after, text, capability_set=set_id))

        def place(one: Replica) -> str:
            return f"{one.id} on {adapter_name(one.adapter)}" if one.adapter else one.id

        count = sum(one.aimed_at for one in rows)
        if silent:
            lost, names = sum(one.adapter in silent for one in rows), ", ".join(sorted(silent))
            text = f"{counted(lost, 'replica has', 'replicas have')} not been heard of (adapters: {names}); not replaced"
            add(Code.ADAPTER_LOST, count, count, text)
        for text in losses(rows):
            add(Code.REVOKED, count, count, text)
        if given:
            text = f"asked to finish and stop, to give way: {', '.join(map(place, given))}"
            add(Code.STOP, count + len(given), count, text)
        for set_id, planned in self.plans.items():
            own, delay = [one for one in rows if one.group.set == set_id], self.delays.get(set_id)
            count, leaving = sum(one.aimed_at for one in own), sum(one.leaving for one in own)
            if planned.start and delay:
                failed = (one for one in kept if one.group.set == set_id and one.state is ReplicaState.FAILED)
                why = max(failed, key=lambda one: one.ended_at or 0.0).reason
                text = f"replicas failed{why and f' ({why})'}: the next one starts in {delay:.1f} s"
                add(Code.BACK_OFF, count, count, text, set_id)
            elif planned.start:
                text = f"starts {planned.start} more {set_id}".rstrip()
                text += f", {min(planned.start, leaving)} of them in place of those" if leaving else ""
                add(Code.START, count, count + planned.start, text, set_id)
            if planned.stop:
                text = f"asked to finish and stop: {', '.join(map(place, planned.stop))}"
                add(Code.STOP, count, count - len(planned.stop), text, set_id)
        return tuple(steps)
