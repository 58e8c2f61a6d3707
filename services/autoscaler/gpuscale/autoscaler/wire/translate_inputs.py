"""All that an evaluation went by, between the model and the wire: exact to the bit, so that it can be had again."""

from __future__ import annotations

from collections.abc import Iterable

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain.model import Observation, ObservationStatus
from gpuscale.autoscaler.domain.pace import Memory
from gpuscale.autoscaler.domain.policies.outcome import Burst, Inputs
from gpuscale.autoscaler.domain.series import Aggregation, Series
from gpuscale.autoscaler.domain.whatif import Question
from gpuscale.autoscaler.wire.translate import spec_from_wire, spec_to_wire
from gpuscale.autoscaler.wire.translate_capabilities import (
    set_state_from_wire,
    set_state_to_wire,
    tasks_from_wire,
)
from gpuscale.autoscaler.wire.translate_state import observation_to_wire
from gpuscale.common.wire import to_datetime, to_timestamp

_STATUSES = {api.Observation.Status.Value(f"STATUS_{one.value}"): one for one in ObservationStatus}
_AGGREGATIONS = {api.Aggregation.Value(f"AGGREGATION_{one.name}"): one for one in Aggregation}
_Signal = api.DecisionInputs.Signal
_Count = api.DecisionInputs.Count


def question_to_wire(question: Question) -> api.DecisionInputs:
    """The message of all that an evaluation goes by."""
    inputs, memory = question.inputs, question.memory
    unseen = [name for name in inputs.series if name not in inputs.observations]
    return api.DecisionInputs(
        spec=spec_to_wire(question.spec),
        before=inputs.before,
        ready_replicas=inputs.ready,
        unknown_replicas=question.unknown_replicas,
        now=inputs.now,
        time=to_timestamp(inputs.wall),
        startup=inputs.startup,
        signals=[
            *(_signal_to_wire(one, inputs.history(name)) for name, one in inputs.observations.items()),
            *(_past_to_wire(name, inputs.history(name)) for name in unseen),
        ],
        rule_changes=[
            api.DecisionInputs.RuleChange(rule=rule, at=at) for rule, at in inputs.last_changes.items()
        ],
        bursts=[
            api.DecisionInputs.Burst(rule=rule, over_at=one.over_at, peak=one.peak)
            for rule, one in inputs.bursts.items()
        ],
        since=memory.since,
        asked=_counts_to_wire(memory.asked),
        changes=_counts_to_wire(memory.changes),
        gpu_limit=inputs.gpu_limit,
        capability_sets=[set_state_to_wire(name, one) for name, one in inputs.sets.items()],
    )


def question_from_wire(wire: api.DecisionInputs) -> Question:
    """All that an evaluation went by."""
    inputs = Inputs(
        before=wire.before,
        ready=wire.ready_replicas,
        now=wire.now,
        wall=to_datetime(wire.time),
        observations={one.observation.signal: _observation(one) for one in wire.signals if not one.absent},
        series={one.observation.signal: Series(tuple(one.times), tuple(one.values)) for one in wire.signals},
        last_changes={one.rule: one.at for one in wire.rule_changes},
        bursts={one.rule: Burst(one.over_at, one.peak) for one in wire.bursts},
        startup=wire.startup if wire.HasField("startup") else None,
        gpu_limit=wire.gpu_limit if wire.HasField("gpu_limit") else None,
        sets={one.id: set_state_from_wire(one) for one in wire.capability_sets},
    )
    memory = Memory(wire.since, _counts(wire.asked), _counts(wire.changes))
    return Question(spec_from_wire(wire.spec, "spec"), inputs, memory, wire.unknown_replicas)


def _signal_to_wire(one: Observation, past: Series) -> _Signal:
    return _Signal(
        observation=observation_to_wire(one),
        value=one.value,
        age=one.age,
        proven_empty=one.proven_empty,
        ignored=one.ignored,
        silent_count=one.silent_count,
        told_count=one.told_count,
        across=api.Aggregation.Value(f"AGGREGATION_{one.across.name}"),
        times=past.times,
        values=past.values,
    )


def _past_to_wire(name: str, past: Series) -> _Signal:
    known = api.Observation(signal=name)
    return _Signal(observation=known, times=past.times, values=past.values, absent=True)


def _observation(wire: _Signal) -> Observation:
    return Observation(
        signal=wire.observation.signal,
        status=_STATUSES[wire.observation.status],
        value=wire.value if wire.HasField("value") else None,
        age=wire.age if wire.HasField("age") else None,
        detail=wire.observation.detail,
        proven_empty=wire.proven_empty,
        ignored=wire.ignored,
        silent_count=wire.silent_count,
        told_count=wire.told_count,
        across=_AGGREGATIONS[wire.across],
        tasks=tasks_from_wire(wire.observation.tasks, "tasks")
        if wire.observation.HasField("tasks")
        else None,
    )


def _counts_to_wire(counts: Iterable[tuple[float, int]]) -> list[_Count]:
    return [_Count(at=at, replicas=count) for at, count in counts]


def _counts(wire: Iterable[_Count]) -> tuple[tuple[float, int], ...]:
    return tuple((one.at, one.replicas) for one in wire)
