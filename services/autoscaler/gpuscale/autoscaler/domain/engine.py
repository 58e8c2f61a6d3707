"""What all rules together, a person's order and the endpoint's bounds make of the count. Pure: time is an argument.

    activate -> rules -> combine -> warm spares -> pace -> zero gate -> bounds -> GPU gate

Bounds clamp, whoever asked. An unknown signal, or a replica that nobody has heard of, never lowers the
count. A count outside of its bounds is repaired whatever the rules and their signals say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gpuscale.autoscaler.domain.capability_engine import evaluate_sets
from gpuscale.autoscaler.domain.combine import Combined, combine
from gpuscale.autoscaler.domain.model import (
    ASKS_FOR_ROOM,
    Code,
    EndpointSpec,
    Evaluation,
    GpuGate,
    Observation,
    ObservationStatus,
    Signal,
    Stage,
    Step,
)
from gpuscale.autoscaler.domain.pace import Memory, Paced, longest, paced
from gpuscale.autoscaler.domain.policies.apply import apply_rule, in_order
from gpuscale.autoscaler.domain.policies.outcome import Burst, Inputs, RuleOutcome
from gpuscale.autoscaler.domain.rules import BoundMode, ScalingMode


@dataclass(frozen=True, slots=True)
class Result:
    """An evaluation, and what is to be remembered for the next."""

    evaluation: Evaluation
    memory: Memory
    bursts: Mapping[str, Burst]


def evaluate(
    spec: EndpointSpec, inputs: Inputs, memory: Memory | None = None, unknown_replicas: int = 0
) -> Result:
    """One evaluation.

    Args:
        spec: what is wanted of the endpoint.
        inputs: what rules go by.
        memory: what was remembered since the last; None remembers from now on.
        unknown_replicas: live replicas whose adapter has not been heard of.
    """
    memory = Memory(inputs.now) if memory is None else memory
    if spec.capability_sets:
        return Result(evaluate_sets(spec, inputs, unknown_replicas), memory, inputs.bursts)
    before = inputs.before
    working = inputs if spec.paused else replace(inputs, before=max(0, before - spec.warm_spares))
    asleep = None if spec.paused else _asleep(spec, working)
    awake = not spec.paused and asleep is None
    outcomes = [apply_rule(rule, working) for rule in in_order(spec.rules)] if awake else []
    combined = _combined(spec, working.before, outcomes, unknown_replicas, asleep)
    spares = _spares(spec, combined.step.after) if spec.warm_spares and not spec.paused else None
    asked = spares.after if spares else combined.step.after
    pace = paced(spec.up, spec.pace_down, before, asked, memory, inputs.now, inputs.startup)
    floor, not_empty = _zero_gate(spec, before, pace.count, inputs.observations)
    bounds, clamped_by = _bound(spec, before, floor)
    gate = _gpu_gate(spec, before, bounds.after, inputs.gpu_limit)
    gated = gate.after if gate else bounds.after
    shadow = _shadow(spec, before, gated)
    wanted = shadow.after if shadow else gated
    optional = [not_empty, bounds, gate, shadow]
    after_rules = [combined.step, *filter(None, (spares,)), *pace.steps, *filter(None, optional)]
    seen = inputs.observations
    evaluation = Evaluation(
        before=before,
        wanted=wanted,
        observations=tuple(seen[signal.id] for signal in spec.signals if signal.id in seen),
        steps=(*(one.step for one in outcomes), *after_rules),
        effective=_effective(combined, before, wanted),
        limited_by=_limit(combined, pace, not_empty, clamped_by, gate, shadow),
        asked=asked,
    )
    keep = longest(spec.up, spec.pace_down)
    kept = memory.noted(inputs.now, asked, before, wanted, keep)
    bursts = {one.rule: one.burst for one in outcomes if one.burst is not None}
    return Result(evaluation, kept, bursts)


def order(before: int, replicas: int, who: str, capability_set: str = "") -> Evaluation:
    """A person's order of `replicas`, which the caller has checked against min and max."""
    what = f"{capability_set} set" if capability_set else "set"
    text = f"{what} to {replicas} by {who}"
    step = Step(Stage.MANUAL, Code.SET, before, replicas, text, capability_set=capability_set)
    return Evaluation(before, replicas, (), (step,))


def _asleep(spec: EndpointSpec, inputs: Inputs) -> Step | None:
    """With no replicas rules are read only while some signal is above its activation threshold, where one is set."""
    guarded = [signal for signal in spec.signals if signal.activation_threshold > 0]
    if inputs.before > 0 or not guarded or any(_active(signal, inputs) for signal in guarded):
        return None
    names = ", ".join(f"{signal.id} > {signal.activation_threshold:g}" for signal in guarded)
    return Step(Stage.ACTIVATE, Code.INACTIVE, inputs.before, inputs.before, f"waits for {names}")


def _active(signal: Signal, inputs: Inputs) -> bool:
    seen = inputs.observations.get(signal.id)
    if seen is None or seen.value is None or seen.status is not ObservationStatus.OK:
        return False
    return seen.value > signal.activation_threshold


def _combined(
    spec: EndpointSpec,
    before: int,
    outcomes: Sequence[RuleOutcome],
    unknown_replicas: int,
    asleep: Step | None,
) -> Combined:
    if spec.paused:
        step = Step(Stage.COMBINE, Code.PAUSED, before, before, "paused: rules change nothing")
        return Combined(step, Code.PAUSED)
    if asleep is not None:
        return Combined(asleep, Code.INACTIVE)
    return combine(spec.combine, before, outcomes, unknown_replicas)


def _spares(spec: EndpointSpec, working: int) -> Step:
    """Rules go by the replicas without the spares; the spares come on top of what they want."""
    after = working + spec.warm_spares
    return Step(Stage.SPARES, Code.WARM_SPARES, working, after, f"{spec.warm_spares} warm spares on top")


def _gpu_gate(spec: EndpointSpec, before: int, asked: int, limit: int | None) -> Step | None:
    """What GPUs there are has to say to more replicas. It takes none away: whoever is there has its GPUs.

    What repairs a count below min_replicas is not held back: those replicas wait for their GPUs.
    """
    if asked <= max(before, spec.min_replicas) or spec.gpu_gate not in ASKS_FOR_ROOM:
        return None
    if not spec.template.gpu_count or (limit is not None and limit >= asked):
        return None
    if limit is None:
        return _gate(spec, Code.GPUS_UNKNOWN, before, asked, before, "nobody knows how many GPUs are free")
    text = f"GPUs are there for {limit}"
    code = Code.CAPPED_BY_GPUS if spec.gpu_gate is GpuGate.CAP else Code.GPUS_SHORT
    return _gate(spec, code, before, asked, limit, text)


def _gate(spec: EndpointSpec, code: Code, before: int, asked: int, limit: int, text: str) -> Step:
    caps = spec.gpu_gate is GpuGate.CAP
    after = max(before, spec.min_replicas, limit) if caps else asked
    return Step(Stage.GPU, code, asked, after, text if caps else f"{text}; the rest would wait")


def _zero_gate(
    spec: EndpointSpec, before: int, after: int, observations: Mapping[str, Observation]
) -> tuple[int, Step | None]:
    """Rules lead to zero only while every signal that counts work is freshly 0: nothing waits, nothing is in hand.

    Signals that count no work, such as a temperature, are not asked.
    """
    if after > 0 or before <= 0 or spec.min_replicas > 0:
        return after, None
    counting = [signal.id for signal in spec.signals if signal.proves]
    doubtful = [name for name in counting if name not in observations or not observations[name].proven_empty]
    if not doubtful:
        return after, None
    text = f"kept at 1: not proven that no work is left ({', '.join(doubtful)})"
    return 1, Step(Stage.BOUNDS, Code.NOT_PROVEN_EMPTY, after, 1, text)


def _bound(spec: EndpointSpec, before: int, asked: int) -> tuple[Step, Code | None]:
    """Hold the count to the endpoint's min and max; max wins where a stored spec has them crossed."""
    least, most = spec.min_replicas, spec.max_replicas
    after = min(max(asked, least), most)
    within = f"{least}-{most}"

    def step(code: Code, text: str, to: int = after) -> tuple[Step, Code | None]:
        return Step(Stage.BOUNDS, code, asked, to, text), None if code is Code.WITHIN_BOUNDS else code

    if after == asked:
        return step(Code.WITHIN_BOUNDS, f"within {within}")
    inside = least <= before <= most
    if spec.bound_mode is BoundMode.SKIP and inside and asked != before:
        code = Code.SKIPPED_AT_MAX if asked > most else Code.SKIPPED_AT_MIN
        return step(code, f"{asked} is not within {within}: skipped", before)
    if after < asked:
        return step(
            Code.ABOVE_MAX if before > most else Code.CLAMPED_TO_MAX, f"max_replicas is {spec.max_replicas}"
        )
    return step(
        Code.BELOW_MIN if before < least else Code.CLAMPED_TO_MIN, f"min_replicas is {spec.min_replicas}"
    )


def _shadow(spec: EndpointSpec, before: int, after: int) -> Step | None:
    """In shadow mode the count stays, and the decision says what it would be; bounds are kept even so."""
    if spec.mode is not ScalingMode.SHADOW or after == before:
        return None
    kept = min(max(before, spec.min_replicas), spec.max_replicas)
    if kept == after:
        return None
    return Step(Stage.BOUNDS, Code.SHADOWED, after, kept, f"in shadow mode: {after} would be wanted")


def _limit(
    combined: Combined,
    pace: Paced,
    not_empty: Step | None,
    clamped_by: Code | None,
    gate: Step | None,
    shadow: Step | None,
) -> Code | None:
    """The last thing that held the count back."""
    if shadow is not None:
        return shadow.code
    if gate is not None and gate.after != gate.before:
        return gate.code
    return clamped_by or (not_empty.code if not_empty else None) or pace.limited_by or combined.limited_by


def _effective(combined: Combined, before: int, wanted: int) -> frozenset[str]:
    """Rules that asked for what the combination took, if the count moved their way at all."""
    own, asked = combined.step.before, combined.step.after
    moved = (asked > own and wanted > before) or (asked < own and wanted < before)
    return combined.taken if moved else frozenset()
