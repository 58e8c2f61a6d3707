"""How many replicas to start, which to stop, and which adapter gets one. Pure.

Silent replicas (their adapter has not been heard of) count as running, so nothing is started in their place, and do not
count as running when it comes to stopping others: whichever they turn out to be, no fewer than wanted are left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from gpuscale.autoscaler.model import ReplicaTemplate
from gpuscale.autoscaler.replicas import Goal, Moment, Replica, ReplicaState

MAX_PENDING = 32
"""Replicas of one endpoint that wait for GPUs or an adapter at a time; more would wait behind them anyway."""
FIRST_BACK_OFF = 1.0
LONGEST_BACK_OFF = 60.0
HEALTHY = 60.0
"""Seconds of being ready after which a failure begins a new count."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What brings the replicas closer to the number wanted; `held`: so many stops wait for silent adapters."""

    start: int = 0
    stop: tuple[Replica, ...] = ()
    held: int = 0


def plan(wanted: int, replicas: Iterable[Replica], silent: Collection[str]) -> Plan:
    """Compare the replicas aimed at with the number wanted.

    Victims, in this order: those that nobody was told of, starting, leaving by themselves, newest. `silent` holds the
    ids of adapters that have not been heard of.
    """
    aimed_at = [replica for replica in replicas if replica.aimed_at]
    pending = [replica for replica in aimed_at if replica.state is ReplicaState.PENDING]
    excess = len(aimed_at) - wanted
    if excess <= 0:
        return Plan(start=min(-excess, max(0, MAX_PENDING - len(pending))))
    heard = [replica for replica in aimed_at if replica.adapter and replica.adapter not in silent]
    # Where none is wanted, none too few can be left: the silent ones are told as soon as they are heard of.
    known = heard if wanted else [replica for replica in aimed_at if replica.adapter]
    cancelled = _newest_first(pending)[:excess]
    spare = min(excess - len(cancelled), max(0, len(known) - wanted))
    stopped = _victims(known)[:spare]
    return Plan(stop=(*cancelled, *stopped), held=excess - len(cancelled) - spare)


def _newest_first(replicas: Iterable[Replica]) -> list[Replica]:
    return sorted(replicas, key=lambda replica: (replica.create_time, replica.id), reverse=True)


_STOPS_FIRST = {ReplicaState.STARTING: 0, ReplicaState.DRAINING: 1}


def _victims(replicas: Iterable[Replica]) -> list[Replica]:
    return sorted(_newest_first(replicas), key=lambda replica: _STOPS_FIRST.get(replica.state, 2))


def crash_delay(replicas: Iterable[Replica], now: float) -> float:
    """Seconds until a replacement may start, after replicas that ended by themselves: 1 s doubling to 60 s.

    A replica that was ready for 60 s before it failed begins a new count, and so does a failure that comes so late that
    the endpoint was well in between. Failures within a second of each other are one: a fault that takes all replicas at
    once says no more than one that takes a single one.
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
    count = 0
    for index, (ended_at, ready_at) in enumerate(failures):
        if index and failures[index - 1][0] - ended_at > LONGEST_BACK_OFF + HEALTHY:
            break
        if not index or failures[index - 1][0] - ended_at >= FIRST_BACK_OFF:
            count += 1
        if ready_at is not None and ended_at - ready_at >= HEALTHY:
            break
    if not count:
        return 0.0
    delay = min(LONGEST_BACK_OFF, FIRST_BACK_OFF * 2.0 ** (count - 1))
    return max(0.0, failures[0][0] + delay - now)


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """What an adapter said of itself, and whether it is heard of now (`live`). `max_replicas` 0: no limit."""

    id: str
    kind: str
    node: str
    templates: frozenset[str]
    max_replicas: int
    live: bool


def candidates(
    template: ReplicaTemplate, adapters: Sequence[AdapterFacts], loads: Mapping[str, int]
) -> list[AdapterFacts]:
    """Adapters that can run a replica of `template`, the one with the fewest replicas first, then by id.

    `loads` holds the replicas of each adapter. GPUs need an adapter that is bound to a node.
    """
    able = [
        adapter
        for adapter in adapters
        if adapter.live
        and template.template in adapter.templates
        and template.adapter in {"", adapter.id}
        and (template.gpu_count == 0 or adapter.node)
        and (adapter.max_replicas == 0 or loads.get(adapter.id, 0) < adapter.max_replicas)
    ]
    return sorted(able, key=lambda adapter: (loads.get(adapter.id, 0), adapter.id))


def nobody(template: ReplicaTemplate, adapters: Sequence[AdapterFacts]) -> str:
    """Why no adapter can run a replica of `template`, in words."""
    named = [adapter for adapter in adapters if template.adapter in {"", adapter.id}]
    live = [adapter for adapter in named if adapter.live]
    able = [adapter for adapter in live if template.template in adapter.templates]
    if not live:
        return (
            f"adapter {template.adapter} is not connected" if template.adapter else "no adapter is connected"
        )
    if not able:
        return f"no adapter that is connected has the template {template.template}"
    if template.gpu_count and not any(adapter.node for adapter in able):
        return f"no adapter with the template {template.template} is bound to a node, whose GPUs it could use"
    return f"the adapters with the template {template.template} run as many replicas as they may"


def startup_seconds(replicas: Iterable[Replica], at: Moment) -> float | None:
    """Median seconds from the decision to being ready, of the replicas that are known; None where none was ready.

    Waiting for GPUs is part of it: whoever looks ahead has to look over that too.
    """
    took = sorted(
        max(0.0, at.wall.timestamp() - (at.now - one.ready_at) - one.create_time.timestamp())
        for one in replicas
        if one.ready_at is not None
    )
    return took[len(took) // 2] if took else None
