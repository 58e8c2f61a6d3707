"""DecisionService on the wire."""

from functools import partial

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.servicers.evaluations import Evaluations
from gpuscale.autoscaler.servicers.verifying import verified
from gpuscale.autoscaler.state.decision_log import DecisionLog, to_wire
from gpuscale.autoscaler.wire.translate import spec_from_wire
from gpuscale.autoscaler.wire.translate_evaluate import stated_from_wire
from gpuscale.common.names import DECISION, ENDPOINT, parse
from gpuscale.common.security.auth import Context


class DecisionServicer(api.DecisionServiceServicer):
    """Shows stored decisions, and what one would be."""

    def __init__(self, log: DecisionLog, evaluations: Evaluations) -> None:
        self._log = log
        self._evaluations = evaluations

    async def GetDecision(self, request: api.GetDecisionRequest, context: Context) -> api.GetDecisionResponse:
        """Return one decision."""
        ids = parse(DECISION, request.name)
        return api.GetDecisionResponse(
            decision=to_wire(await self._log.get(ids["endpoint"], ids["decision"]), inputs=True)
        )

    async def VerifyDecision(
        self, request: api.VerifyDecisionRequest, context: Context
    ) -> api.VerifyDecisionResponse:
        """Evaluate a stored decision again."""
        ids = parse(DECISION, request.name)
        return verified(to_wire(await self._log.get(ids["endpoint"], ids["decision"]), inputs=True))

    async def ListDecisions(
        self, request: api.ListDecisionsRequest, context: Context
    ) -> api.ListDecisionsResponse:
        """List decisions, newest first."""
        endpoint = parse(ENDPOINT, request.parent, "parent")["endpoint"] if request.parent else ""
        stored, token = await self._log.list(endpoint, request.page_size, request.page_token)
        return api.ListDecisionsResponse(decisions=[to_wire(one) for one in stored], next_page_token=token)

    async def QuerySignals(
        self, request: api.QuerySignalsRequest, context: Context
    ) -> api.QuerySignalsResponse:
        """Return what the signals of an endpoint showed."""
        return await self._evaluations.signals(parse(ENDPOINT, request.name)["endpoint"])

    async def Evaluate(self, request: api.EvaluateRequest, context: Context) -> api.EvaluateResponse:
        """Say what an evaluation would come to."""
        endpoint = parse(ENDPOINT, request.name)["endpoint"] if request.name else ""
        spec = spec_from_wire(request.spec, "spec") if request.HasField("spec") else None
        return await self._evaluations.evaluate(endpoint, spec, partial(stated_from_wire, request))
