"""Builders of autoscaler values with sensible defaults, so that a test names only what it is about."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from gpuscale.autoscaler.domain import engine, signals
from gpuscale.autoscaler.domain.decisions import Evaluation
from gpuscale.autoscaler.domain.engine import Memory
from gpuscale.autoscaler.domain.inputs import Inputs, Observation, ObservationStatus
from gpuscale.autoscaler.domain.replicas import Moment, Replica, ReplicaLease, ReplicaState, Revocation
from gpuscale.autoscaler.domain.rules.rule import Comparator, Rule, StepRule
from gpuscale.autoscaler.domain.signals import QueueReading, QueueState
from gpuscale.autoscaler.domain.spec import (
    Endpoint,
    EndpointSpec,
    QueueCount,
    QueueSignal,
    ReplicaTemplate,
    Signal,
)

NOW = 1000.0
WALL = datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC)
AT = Moment(NOW, WALL)


def signal(
    name: str = "queue", *, watcher: str = "jobs", count: QueueCount = QueueCount.TOTAL, **fields: Any
) -> Signal:
    return Signal(name, QueueSignal(watcher, count), **fields)


def rule(
    name: str = "r", comparison: str = "> 10", step: int = 1, *, signal: str = "queue", **fields: Any
) -> Rule:
    """A step rule, written as `rule("up", "> 10", +2)`."""
    comparator, threshold = comparison.split()
    return Rule(name, signal, StepRule(Comparator(comparator), float(threshold), step), **fields)


def up(name: str = "up", comparison: str = "> 10", step: int = 1, **fields: Any) -> Rule:
    return rule(name, comparison, step, **fields)


def down(name: str = "down", comparison: str = "< 5", step: int = -1, **fields: Any) -> Rule:
    return rule(name, comparison, step, **fields)


def spec(
    *rules: Rule, low: int = 0, high: int = 10, signals: Iterable[Signal] | None = None, **fields: Any
) -> EndpointSpec:
    """A spec whose signals are those its rules name, unless they are given."""
    named = [signal(name) for name in sorted({one.signal for one in rules})] if signals is None else signals
    fields.setdefault("template", ReplicaTemplate("worker"))
    return EndpointSpec(low, high, signals=tuple(named), rules=rules, **fields)


def endpoint(
    wanted: EndpointSpec | None = None, *, name: str = "e", desired: int = 1, **fields: Any
) -> Endpoint:
    return Endpoint(name, wanted or spec(), "etag-1", desired, WALL, WALL, **fields)


def seen(
    value: float | None = None, name: str = "queue", *, status: ObservationStatus | None = None
) -> Observation:
    """An observation: OK with a value, else MISSING; a value of 0 is proven to be all there is."""
    if value is None:
        return Observation(name, status or ObservationStatus.MISSING, detail="queue unreachable")
    return Observation(name, status or ObservationStatus.OK, value, 1.0, proven_empty=value == 0)


def observed(*observations: Observation) -> dict[str, Observation]:
    return {one.signal: one for one in observations}


def reading(
    ready: int | None = 0, unacked: int | None = 0, *, age: float = 1.0, state: QueueState = QueueState.OK
) -> QueueReading:
    return QueueReading(state, ready, unacked, 1, NOW - age)


def replica(number: int = 0, state: ReplicaState = ReplicaState.PENDING, **fields: Any) -> Replica:
    """Replica `r<number>` of endpoint `e`; later numbers are newer. Past PENDING it has adapter `a`."""
    if state is not ReplicaState.PENDING:
        fields.setdefault("adapter", "a")
    made = Replica(
        "e", f"r{number:03d}", f"00000000-0000-4000-8000-{number:012d}", ReplicaTemplate("worker"),
        WALL + timedelta(seconds=number), state,
    )  # fmt: skip
    return replace(made, **fields)


def leaving(one: Replica, *, leave_at: float = NOW + 30) -> Replica:
    """The replica once it is known that its GPUs will be taken away, 10 s after it is asked to finish at the latest."""
    return replace(one, revocation=Revocation(leave_at + 10, leave_at, WALL, "nodes/b is drained"))


def inputs(before: int = 1, *observations: Observation, **fields: Any) -> Inputs:
    """What rules go by at NOW; all replicas are ready unless `ready` says otherwise."""
    fields = {"ready": before, "now": NOW, "wall": WALL, "observations": observed(*observations)} | fields
    return Inputs(before, **fields)


def evaluate(
    wanted: EndpointSpec,
    before: int,
    seen: Mapping[str, Observation],
    last: Mapping[str, float],
    now: float,
    unknown_replicas: int = 0,
    **fields: Any,
) -> Evaluation:
    """One evaluation that remembers nothing but when rules last changed the count."""
    going_by = inputs(before, observations=seen, last_changes=last, now=now, **fields)
    return engine.evaluate(wanted, going_by, Memory(0.0), unknown_replicas).evaluation


def observe(one: Signal, shown: QueueReading | None, now: float) -> Observation:
    """What a signal of a queue shows."""
    assert isinstance(one.source, QueueSignal)
    return signals.observe(one, signals.queue_sample(one.source, shown), now)


def lease(number: int = 1) -> ReplicaLease:
    return ReplicaLease(f"reservations/v{number}", number, (f"GPU-{number}",), f"token of v{number}")
