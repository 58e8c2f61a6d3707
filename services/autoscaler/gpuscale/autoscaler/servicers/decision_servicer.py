"""DecisionService on the wire: stored decisions, their verification, and hypothetical evaluations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

from google.protobuf.message import Message

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain.decisions import DecisionOutcome, compose
from gpuscale.autoscaler.domain.engine import asked
from gpuscale.autoscaler.domain.planning import capacity_of, secured
from gpuscale.autoscaler.domain.replicas import Moment
from gpuscale.autoscaler.domain.spec import Endpoint
from gpuscale.autoscaler.domain.whatif import answer, hypothetical, question
from gpuscale.autoscaler.loop.reconciler import Dependencies, Reconciler, gathered, question_of, read_known
from gpuscale.autoscaler.servicers.endpoints import find_endpoint
from gpuscale.autoscaler.servicers.feeds import Feeds
from gpuscale.autoscaler.state.decision_log import DecisionLog, inputs_of, to_wire
from gpuscale.autoscaler.wire import decisions
from gpuscale.autoscaler.wire.specs import spec_from_wire, spec_violations
from gpuscale.common.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from gpuscale.common.names import DECISION, ENDPOINT, endpoint_name, parse
from gpuscale.common.security.auth import Context
from gpuscale.common.wire import asked_period, optional_timestamp
from gpuscale.internal.autoscaler import v1 as internal

AFTERWARDS = frozenset({api.DecisionStep.STAGE_GPU, api.DecisionStep.STAGE_ACT})
"""Stages of steps that say what was done about an evaluation."""


def verified(stored: api.Decision, inputs: internal.DecisionInputs | None) -> api.VerifyDecisionResponse:
    """Whether a decision is reproduced from its inputs, or the differences; the inputs must be stored."""
    if inputs is None:
        text = f"{stored.name} was stored without its inputs: no rule was read for it, or they were too long"
        raise FailedPreconditionError(text, reason="DECISION_WITHOUT_INPUTS", metadata={"name": stored.name})
    again = decisions.evaluation_to_wire(asked(decisions.question_from_wire(inputs)).evaluation)
    counts = (("before", stored.before, again.before), ("wanted", stored.wanted, again.wanted))
    evaluated, afterwards = stored.steps[: len(again.steps)], stored.steps[len(again.steps) :]
    found = [
        *(f"{what} was {was} and is {now}" for what, was, now in counts if was != now),
        *_unlike("capability set", stored.capability_sets, again.capability_sets),
        *_unlike("observation", stored.observations, again.observations),
        *_unlike("step", evaluated, again.steps),
        *(f"a step is gone: {_line(one)}" for one in afterwards if one.stage not in AFTERWARDS),
    ]
    return api.VerifyDecisionResponse(equal=not found, differences=found, decision=again)


def _unlike(what: str, was: Iterable[Message], again: Iterable[Message]) -> Iterator[str]:
    for number, (one, other) in enumerate(zip_longest(was, again), 1):
        if one != other:
            yield f"{what} {number} was {_line(one)} and is {_line(other)}"


def _line(message: Message | None) -> str:
    return "not there" if message is None else " ".join(str(message).split())


class DecisionServicer(api.DecisionServiceServicer):
    """Shows stored decisions, and hypothetical ones."""

    def __init__(self, deps: Dependencies, reconciler: Reconciler, log: DecisionLog, feeds: Feeds) -> None:
        self._deps = deps
        self._reconciler = reconciler
        self._log = log
        self._feeds = feeds

    async def GetDecision(self, request: api.GetDecisionRequest, context: Context) -> api.GetDecisionResponse:
        ids = parse(DECISION, request.name)
        return api.GetDecisionResponse(
            decision=to_wire(await self._log.get(ids["endpoint"], ids["decision"]))
        )

    async def VerifyDecision(
        self, request: api.VerifyDecisionRequest, context: Context
    ) -> api.VerifyDecisionResponse:
        ids = parse(DECISION, request.name)
        stored = await self._log.get(ids["endpoint"], ids["decision"])
        return verified(to_wire(stored), inputs_of(stored))

    async def ListDecisions(
        self, request: api.ListDecisionsRequest, context: Context
    ) -> api.ListDecisionsResponse:
        endpoint = parse(ENDPOINT, request.parent, "parent")["endpoint"] if request.parent else ""
        listed, token, since = await self._log.list(endpoint, request, asked_period(request))
        return api.ListDecisionsResponse(
            decisions=listed, next_page_token=token, kept_since=optional_timestamp(since)
        )

    async def WatchDecisions(
        self, request: api.WatchDecisionsRequest, context: Context
    ) -> AsyncGenerator[Any]:
        async for message in self._feeds.stream(self._feeds.decisions, request, api.Decision):
            yield message

    async def QuerySignals(
        self, request: api.QuerySignalsRequest, context: Context
    ) -> api.QuerySignalsResponse:
        endpoint = parse(ENDPOINT, request.name)["endpoint"]
        await self._deps.store.read(partial(find_endpoint, endpoint_id=endpoint))
        return api.QuerySignalsResponse(
            signals=[
                api.SignalHistory(signal=signal, samples=[decisions.sample_to_wire(one) for one in shown])
                for signal, shown in self._reconciler.samples(endpoint).items()
            ]
        )

    async def Evaluate(self, request: api.EvaluateRequest, context: Context) -> api.EvaluateResponse:
        spec = spec_from_wire(request.spec, "spec") if request.HasField("spec") else None
        if spec is not None and (wrong := spec_violations(spec, "spec")):
            raise InvalidArgumentError.of(wrong)
        at = Moment(self._deps.clock.now(), self._deps.clock.wall())
        endpoint_id = parse(ENDPOINT, request.name)["endpoint"] if request.name else ""
        if endpoint_id:
            deps = self._deps
            found = await deps.store.read(partial(read_known, endpoint_id=endpoint_id, before=None))
            known = NotFoundError.unless(found, endpoint_name(endpoint_id))
            facts = gathered(deps, known, self._reconciler.past(endpoint_id), at, evaluate=True)
            endpoint, rows = known.endpoint, known.replicas
            silent = frozenset(one.adapter for one in rows if one.adapter) - facts.live
            live = question_of(known, known.kept, rows, silent, facts)
            granted = sum(one.granted for one in rows)
            if spec is not None:
                room, capacity = deps.sources.more(spec, deps.hub.facts), capacity_of(spec, rows, facts.busy)
                limit = None if room is None else secured(rows) + room
                live = replace(live, inputs=replace(live.inputs, gpu_limit=limit, capacity=capacity))
                endpoint = replace(endpoint, spec=spec)
        elif spec is not None:
            live, granted = hypothetical(spec, at), spec.min_replicas
            endpoint = Endpoint("", spec, "", granted, at.wall, at.wall)
        else:
            raise InvalidArgumentError("name must be set, or spec", field="name")
        made = question(live, endpoint.spec, decisions.stated_from_wire(request, endpoint.spec, at.now))
        # Every alternative is a separate evaluation: off the loop, since a spec may have many rules.
        found_answer = await asyncio.to_thread(answer, made)
        decision = compose(endpoint, found_answer.result.evaluation, DecisionOutcome(granted))
        return decisions.response_to_wire(found_answer, decisions.decision_body(decision))
