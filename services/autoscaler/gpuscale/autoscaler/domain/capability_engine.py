"""How many worker groups of each capability set, by the tasks that they can run. Pure.

The rule is that of OpenGRIS Scaler (scaling=capability), per set of capabilities:

    more than `up_above` tasks for each worker that can run them, or none that can  ->  one group more of the set that fits
    fewer than `down_below`                                                         ->  one group fewer

No group is removed in a round that adds one, if that would leave tasks without a worker that can run them, or if groups would
at once be requested again. Starting workers, and workers that somebody else started, count as capacity.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from gpuscale.autoscaler.domain.decisions import Code, Evaluation, SetCount, Stage, Step
from gpuscale.autoscaler.domain.inputs import (
    ANY,
    Amounts,
    Inputs,
    SetState,
    TaskDemand,
    TaskReport,
    WorkerGroup,
    covers,
    in_words,
)
from gpuscale.autoscaler.domain.rules.rule import Proposal, RatioRule, RuleOutcome, Vote, judged, unread
from gpuscale.autoscaler.domain.spec import CapabilitySet, EndpointSpec, ScalingMode
from gpuscale.common.sizes import counted

_UNBOUNDED = 1 << 62


@dataclass(frozen=True, slots=True)
class Pool:
    """The groups of one set; the next to stop is at the front."""

    set: CapabilitySet
    offers: Amounts
    groups: tuple[WorkerGroup, ...]
    most: int

    @property
    def before(self) -> int:
        """The number of groups wanted so far."""
        return len(self.groups)


def evaluate_sets(spec: EndpointSpec, inputs: Inputs, unknown_replicas: int = 0) -> Evaluation:
    """Evaluate an endpoint with capability sets; `unknown_replicas` have not been heard of."""
    pools: list[Pool] = []
    for one in spec.capability_sets:
        # Groups that are wanted but not known yet count as requested, and stop first.
        state = inputs.sets.get(one.id) or SetState(one.min_replicas)
        known = state.groups[max(0, len(state.groups) - state.before) :]
        pending = (WorkerGroup(one.capabilities, one.workers),) * (state.before - len(known))
        offers = one.capabilities if state.reported is None else state.reported
        most = spec.max_replicas if one.max_replicas is None else one.max_replicas
        pools.append(Pool(one, offers, (*pending, *known), most))
    before = {pool.set.id: pool.before for pool in pools}
    asked = _asked(spec, pools, inputs, unknown_replicas)
    bounded, bounds = _bounded(spec, pools, asked.counts)
    steps = [*asked.steps, *bounds]
    limit = next((one.code for one in reversed(bounds) if one.code is not Code.WITHIN_BOUNDS), asked.limit)
    wanted = bounded
    if spec.mode is ScalingMode.SHADOW and bounded != before:
        wanted = _bounded(spec, pools, before)[0]
        if wanted != bounded:
            text = f"in shadow mode: {_counts(bounded)} would be wanted"
            limit = Code.SHADOWED
            steps.append(Step(Stage.BOUNDS, limit, sum(bounded.values()), sum(wanted.values()), text))
    moved = any((asked.counts[id_] - had) * (wanted[id_] - had) > 0 for id_, had in before.items())
    return Evaluation(
        before=sum(before.values()),
        wanted=sum(wanted.values()),
        observations=inputs.observed(one.id for one in spec.signals),
        steps=tuple(steps),
        effective=frozenset({asked.rule}) if moved else frozenset(),
        limited_by=limit,
        asked=sum(asked.counts.values()),
        sets={id_: SetCount(before[id_], count) for id_, count in wanted.items()},
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    """The result of the rule, by its id, for each set, with its steps and limits."""

    counts: Mapping[str, int]
    steps: tuple[Step, ...]
    limit: Code | None
    rule: str = ""


def _asked(spec: EndpointSpec, pools: Sequence[Pool], inputs: Inputs, unknown_replicas: int) -> _Asked:
    before = {pool.set.id: pool.before for pool in pools}
    total = sum(before.values())
    if spec.paused:
        step = Step(Stage.COMBINE, Code.PAUSED, total, total, "paused: rules change nothing")
        return _Asked(before, (step,), Code.PAUSED)
    if not total and (signals := spec.sleeps_until(inputs)):
        step = Step(Stage.ACTIVATE, Code.INACTIVE, 0, 0, f"waits for {signals}")
        return _Asked(before, (step,), Code.INACTIVE)
    ratios = [(one, one.kind) for one in spec.rules if isinstance(one.kind, RatioRule)]
    if not ratios:
        return _Asked(before, (Step(Stage.COMBINE, Code.NO_CHANGE, total, total, "no rule"),), None)
    rule, kind = ratios[0]
    held = unread(rule, replace(inputs, before=total))
    if held is None and inputs.observations[rule.signal].tasks is None and inputs.value(rule.signal):
        # A task count in place of a report does not say what tasks need, except for 0.
        text = f"{rule.signal}: what its tasks need is unknown"
        step = Step(Stage.RULE, Code.SIGNAL_MISSING, total, total, text, rule.id)
        held = RuleOutcome(rule.id, Vote.HOLD, step, limited=True)
    if held is not None:
        step = Step(Stage.COMBINE, Code.HELD, total, total, f"{rule.id} holds: {held.step.text}")
        return _Asked(before, (held.step, step), held.step.code if held.limited else None)
    capacity = _Capacity(pools, inputs.observations[rule.signal].tasks or TaskReport())
    starts, unserved = _starts(kind, pools, capacity)
    # When the maximum is reached, others have to make room.
    more = any(pool.set.id in starts and pool.before < pool.most for pool in pools)
    grows = more and total < spec.max_replicas
    wishes = [(one, _wish(kind, one, capacity, starts.get(one.set.id), grows)) for one in pools]
    counts: dict[str, int] = {}
    steps: list[Step] = []
    limit: Code | None = None
    for pool, wish in wishes:  # within the rule's own limits
        name, had = pool.set.id, pool.before
        own = judged(rule, wish, replace(inputs, before=had))
        steps.append(replace(own.step, capability_set=name))
        counts[name] = max(0, own.step.after) if own.vote in {Vote.UP, Vote.DOWN} else had
        limit = own.step.code if own.limited else limit
        if own.vote is Vote.DOWN and unknown_replicas:
            text = f"no scale-in while {counted(unknown_replicas, 'replica has', 'replicas have')} not been heard of"
            limit, counts[name] = Code.REPLICAS_UNKNOWN, had
            steps.append(Step(Stage.COMBINE, limit, had, had, text, capability_set=name))
    after = sum(counts.values())
    for text in unserved:
        limit = Code.NO_CAPABLE_SET
        steps.append(Step(Stage.COMBINE, limit, total, total, text))
    code = Code.UP if after > total else Code.DOWN if after < total else Code.NO_CHANGE
    steps.append(Step(Stage.COMBINE, code, total, after, _counts(counts)))
    return _Asked(counts, tuple(steps), limit, rule.id)


_Key: TypeAlias = tuple[tuple[str, int], ...]


def _key(capabilities: Amounts) -> _Key:
    return tuple(sorted(capabilities.items()))


class _Capacity:
    """The workers by what they can do, and the tasks by what they need."""

    def __init__(self, pools: Sequence[Pool], report: TaskReport) -> None:
        self._workers: Counter[_Key] = Counter()
        for group in (*report.unmanaged_workers, *(group for pool in pools for group in pool.groups)):
            self._workers[_key(group.capabilities)] += group.workers
        tasks: Counter[_Key] = Counter()
        for one in report.demands:
            tasks[_key(one.capabilities)] += one.tasks
        self.demands = [TaskDemand(dict(key), count) for key, count in tasks.items() if count > 0]
        self._alike = {
            _key(needed): sum(
                one.tasks
                for one in self.demands
                if one.capabilities.keys() == needed.keys() and covers(one.capabilities, needed)
            )
            for needed in (one.capabilities for one in self.demands)
        }

    def workers(self, needed: Amounts) -> int:
        return sum(count for offered, count in self._workers.items() if covers(dict(offered), needed))

    def alike(self, demand: TaskDemand) -> int:
        """Tasks that need the same capabilities, at least as much of each: none of them has more workers to run on."""
        return self._alike[_key(demand.capabilities)]

    def runnable(self, offered: Amounts) -> int:
        return sum(one.tasks for one in self.demands if covers(offered, one.capabilities))

    def without(self, group: WorkerGroup) -> None:
        self._workers[_key(group.capabilities)] -= group.workers


def _starts(kind: RatioRule, pools: Sequence[Pool], capacity: _Capacity) -> tuple[dict[str, str], list[str]]:
    """The sets that get one more group, with the reason, and the demands that no set can serve."""
    starts: dict[str, str] = {}
    unserved: list[str] = []
    for one in capacity.demands:
        tasks, workers = capacity.alike(one), capacity.workers(one.capabilities)
        if workers and tasks / workers <= kind.up_above:
            continue
        said = f"{counted(tasks, 'task that needs', 'tasks that need')} {in_words(one.capabilities)}"
        shared = f" for {counted(workers, 'worker')}, more than {kind.up_above:g} each"
        said += shared if workers else " and no worker"
        if (chosen := _fitting(pools, one.capabilities)) is not None:
            starts.setdefault(chosen.set.id, f"{said}: +1 {chosen.set.id}")
            continue
        short = [pool for pool in pools if covers(pool.set.capabilities, one.capabilities)]
        told = ", ".join(f"{pool.set.id} reports {in_words(pool.offers)}" for pool in short)
        unserved.append(f"{said}: no capability set offers that" + (f" ({told})" if told else ""))
    return starts, unserved


def _fitting(pools: Sequence[Pool], needed: Amounts) -> Pool | None:
    """The growable set that can run it with the least to spare: the fewest capabilities and amounts."""

    def spare(pool: Pool) -> tuple[bool, int, int]:
        left = sum(_amount(amount) - _amount(needed.get(name, 0)) for name, amount in pool.offers.items())
        return pool.before >= pool.most, len(pool.offers), left

    return min((pool for pool in pools if covers(pool.offers, needed)), key=spare, default=None)


def _amount(amount: int) -> int:
    return _UNBOUNDED if amount == ANY else amount


def _wish(kind: RatioRule, pool: Pool, capacity: _Capacity, start: str | None, grows: bool) -> Proposal:
    """One more group if `start` gives a reason; one fewer if its workers have too little to do and no set `grows`."""
    before = pool.before
    if start:
        return Proposal(before + 1, start)
    tasks, workers = capacity.runnable(pool.offers), capacity.workers(pool.offers)
    said = f"{counted(tasks, 'task')} that {pool.set.id} can run for {counted(workers, 'worker')}"
    if grows or not before or (workers and tasks / workers >= kind.down_below):
        return Proposal(before, said, fired=False)
    said += f", fewer than {kind.down_below:g} each"
    victim = pool.groups[0]
    if problem := _needed(kind, pool, victim, capacity):
        return Proposal(before, f"{said}, but {problem}", fired=False)
    if before > pool.set.min_replicas:
        capacity.without(victim)
    return Proposal(before - 1, f"{said}: -1 {pool.set.id}")


def _needed(kind: RatioRule, pool: Pool, victim: WorkerGroup, capacity: _Capacity) -> str:
    """Why a group has to stay; empty if it need not."""
    left = capacity.workers(pool.offers) - victim.workers
    if left > 0 and capacity.runnable(pool.offers) / left > kind.up_above:
        return f"with {counted(left, 'worker')} there would be more than {kind.up_above:g} for each"
    for one in capacity.demands:
        if not covers(victim.capabilities, one.capabilities):
            continue
        left = capacity.workers(one.capabilities) - victim.workers
        if left <= 0:
            return f"no other worker can run the {counted(one.tasks, 'task that needs', 'tasks that need')} {in_words(one.capabilities)}"
        if capacity.alike(one) / left > kind.up_above:
            return (
                f"more would be asked for again at once by the tasks that need {in_words(one.capabilities)}"
            )
    return ""


def _bounded(
    spec: EndpointSpec, pools: Sequence[Pool], asked: Mapping[str, int]
) -> tuple[dict[str, int], list[Step]]:
    counts: dict[str, int] = {}
    steps: list[Step] = []
    for pool in pools:
        wish, least, most = asked[pool.set.id], pool.set.min_replicas, pool.most
        counts[pool.set.id] = after = min(max(wish, least), most)
        if after != wish:
            code = _clamp(pool.before, after < wish, least, most)
            text = f"max_replicas is {most}" if after < wish else f"min_replicas is {least}"
            steps.append(Step(Stage.BOUNDS, code, wish, after, text, capability_set=pool.set.id))
    total, aimed = sum(counts.values()), sum(pool.before for pool in pools)
    # Within the endpoint's bounds: first the growth of the last sets is cut, then groups above their min.
    over, under = max(0, total - spec.max_replicas), max(0, spec.min_replicas - total)
    for growth in (True, False):
        for pool in reversed(pools):
            least = max(pool.set.min_replicas, pool.before if growth else 0)
            cut = min(over, max(0, counts[pool.set.id] - least))
            counts[pool.set.id] -= cut
            over -= cut
    for pool in pools:
        more = min(under, max(0, pool.most - counts[pool.set.id]))
        counts[pool.set.id] += more
        under -= more
    after = sum(counts.values())
    if after == total:
        within = f"all sets together within {spec.min_replicas}-{spec.max_replicas}"
        steps.append(Step(Stage.BOUNDS, Code.WITHIN_BOUNDS, total, total, within))
    else:
        code = _clamp(aimed, after < total, spec.min_replicas, spec.max_replicas)
        text = f"all sets together: {_counts(counts)}, within {spec.min_replicas}-{spec.max_replicas}"
        steps.append(Step(Stage.BOUNDS, code, total, after, text))
    # The step that is reported comes last: what limited the count.
    return counts, sorted(steps, key=lambda one: one.code is not Code.WITHIN_BOUNDS)


def _clamp(before: int, lowered: bool, least: int, most: int) -> Code:
    if lowered:
        return Code.ABOVE_MAX if before > most else Code.CLAMPED_TO_MAX
    return Code.BELOW_MIN if before < least else Code.CLAMPED_TO_MIN


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())
