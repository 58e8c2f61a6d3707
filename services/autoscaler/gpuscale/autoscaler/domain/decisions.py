"""The record of an evaluation: its steps with what was done about it, in one line and in full. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpuscale.autoscaler.domain.model import Code, Decision, Endpoint, Evaluation, Stage, Step


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was done about the number wanted: steps of the stages GPU and ACT, and the replicas that have their GPUs."""

    granted: int
    steps: tuple[Step, ...] = ()


LIMITING = frozenset(
    {
        Code.NO_CAPACITY,
        Code.UNSATISFIABLE,
        Code.REFUSED,
        Code.ALLOCATOR_UNAVAILABLE,
        Code.NO_ADAPTER,
        Code.BACK_OFF,
        Code.ADAPTER_LOST,
    }
)
"""Codes of outcome steps that hold the count back."""


def compose(endpoint: Endpoint, evaluation: Evaluation, outcome: Outcome) -> Decision:
    """The record of an evaluation of `endpoint` and of what was done about it."""
    steps = (*evaluation.steps, *outcome.steps)
    limit = next((step.code for step in outcome.steps if step.code in LIMITING), evaluation.limited_by)
    return Decision(
        endpoint=endpoint.id,
        etag=endpoint.etag,
        before=evaluation.before,
        wanted=evaluation.wanted,
        granted=outcome.granted,
        observations=evaluation.observations,
        steps=steps,
        limited_by=limit,
        summary=_summary(evaluation, outcome.granted, steps, limit),
        sets=evaluation.sets,
    )


def afterwards(endpoint: Endpoint, outcome: Outcome) -> Decision:
    """The record of what became of the number wanted between two evaluations."""
    return compose(endpoint, Evaluation(endpoint.desired, endpoint.desired, (), ()), outcome)


def sameness(decision: Decision) -> str:
    """Two decisions in a row with the same sameness say the same: values and ages of signals may differ, codes not."""
    parts = [
        decision.etag,
        f"{decision.before}>{decision.wanted}>{decision.granted}",
        *(f"{one.signal}={one.status.value}" for one in decision.observations),
        *(
            f"{s.stage.name}:{s.rule}{s.capability_set and '/' + s.capability_set}:{s.code}:{s.before}>{s.after}"
            for s in decision.steps
        ),
    ]
    return "\n".join(parts)


def _summary(evaluation: Evaluation, granted: int, steps: Sequence[Step], limit: Code | None) -> str:
    before, wanted = evaluation.before, evaluation.wanted
    line = f"stays at {wanted}" if wanted == before else f"from {before} to {wanted}"
    if moved := [one for one in evaluation.sets.items() if one[1].before != one[1].wanted]:
        line = ", ".join(f"{name} from {count.before} to {count.wanted}" for name, count in moved)
        if limit is not None and (fired := _deciding(steps)):
            line += f" ({fired.text})"
    if granted < wanted and limit in LIMITING:
        line += f", {granted} granted"
    reason = next((step for step in reversed(steps) if step.code is limit), None) or _deciding(steps)
    return f"{line}: {reason.text}" if reason else line


def _deciding(steps: Sequence[Step]) -> Step | None:
    """The step that tells most where nothing was held back: who changed the count, or why nobody did."""
    fired = [step for step in steps if step.stage is Stage.RULE and step.before != step.after]
    others = [step for step in steps if step.stage in {Stage.COMBINE, Stage.MANUAL, Stage.ACT, Stage.GPU}]
    return next(iter([*fired, *others]), None)
