"""Evaluates a stored decision again, from what was stored with it. Pure, but for the messages.

Whatever the engine came to then it has to come to now: a rule that was changed since, or one that goes by something that
is not stored, shows as a difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest

from google.protobuf.message import Message

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain.engine import evaluate
from gpuscale.autoscaler.wire.translate_inputs import question_from_wire
from gpuscale.autoscaler.wire.translate_state import evaluation_to_wire
from gpuscale.common.errors import FailedPreconditionError

AFTERWARDS = frozenset({api.DecisionStep.STAGE_GPU, api.DecisionStep.STAGE_ACT})
"""Stages of steps that tell what was done about an evaluation."""


def verified(stored: api.Decision) -> api.VerifyDecisionResponse:
    """Whether a stored decision comes to the same again, and what does not.

    Raises:
        FailedPreconditionError: nothing was stored to evaluate it from.
    """
    if not stored.HasField("inputs"):
        text = f"{stored.name} was stored without its inputs: no rule was read for it, or they were too long"
        raise FailedPreconditionError(text, reason="DECISION_WITHOUT_INPUTS", metadata={"name": stored.name})
    question = question_from_wire(stored.inputs)
    result = evaluate(question.spec, question.inputs, question.memory, question.unknown_replicas)
    again = evaluation_to_wire(result.evaluation)
    found = list(_differences(stored, again))
    return api.VerifyDecisionResponse(equal=not found, differences=found, decision=again)


def _differences(stored: api.Decision, again: api.Decision) -> Iterator[str]:
    if stored.before != again.before:
        yield f"before was {stored.before} and is {again.before}"
    if stored.wanted != again.wanted:
        yield f"wanted was {stored.wanted} and is {again.wanted}"
    yield from _unlike("capability set", stored.capability_sets, again.capability_sets)
    yield from _unlike("observation", stored.observations, again.observations)
    evaluated, afterwards = stored.steps[: len(again.steps)], stored.steps[len(again.steps) :]
    yield from _unlike("step", evaluated, again.steps)
    yield from (f"a step is gone: {_line(one)}" for one in afterwards if one.stage not in AFTERWARDS)


def _unlike(what: str, was: Iterable[Message], again: Iterable[Message]) -> Iterator[str]:
    for number, (one, other) in enumerate(zip_longest(was, again), 1):
        if one != other:
            yield f"{what} {number} was {_line(one)} and is {_line(other)}"


def _line(message: Message | None) -> str:
    return "not there" if message is None else " ".join(str(message).split())
