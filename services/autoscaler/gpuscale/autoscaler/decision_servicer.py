"""DecisionService on the wire."""

from typing import TypeAlias

import grpc

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.decision_log import DecisionLog, to_wire
from gpuscale.common.names import DECISION, ENDPOINT, parse

_Get: TypeAlias = grpc.aio.ServicerContext[api.GetDecisionRequest, api.GetDecisionResponse]
_List: TypeAlias = grpc.aio.ServicerContext[api.ListDecisionsRequest, api.ListDecisionsResponse]


class DecisionServicer(api.DecisionServiceServicer):
    """Shows stored decisions."""

    def __init__(self, log: DecisionLog) -> None:
        self._log = log

    async def GetDecision(self, request: api.GetDecisionRequest, context: _Get) -> api.GetDecisionResponse:
        """Return one decision."""
        ids = parse(DECISION, request.name)
        return api.GetDecisionResponse(
            decision=to_wire(await self._log.get(ids["endpoint"], ids["decision"]))
        )

    async def ListDecisions(
        self, request: api.ListDecisionsRequest, context: _List
    ) -> api.ListDecisionsResponse:
        """List decisions, newest first."""
        endpoint = parse(ENDPOINT, request.parent, "parent")["endpoint"] if request.parent else ""
        stored, token = await self._log.list(endpoint, request.page_size, request.page_token)
        return api.ListDecisionsResponse(decisions=[to_wire(one) for one in stored], next_page_token=token)
