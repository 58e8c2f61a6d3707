"""PowerService on the wire: messages to values, one use case, values to messages."""

from dataclasses import dataclass

from google.protobuf.json_format import Parse

from gpuscale.allocator.domain.power import PowerBudget, PowerShare
from gpuscale.allocator.servicers.policy_servicers import create_declared, expect_own_node, update_declared
from gpuscale.allocator.servicers.servicer import or_else
from gpuscale.allocator.state.policies import Declaration, PowerChange
from gpuscale.allocator.usecases.declarations import created
from gpuscale.allocator.usecases.partitioning import PartitionEnd
from gpuscale.allocator.usecases.powering import Powering, ToldGpu
from gpuscale.allocator.usecases.rebalancing import Rebalancing
from gpuscale.api.allocator import v1 as api
from gpuscale.common import names, wire
from gpuscale.common.filters import listed
from gpuscale.common.security.auth import Context

_SHARES = {api.PowerShare.Value(f"POWER_SHARE_{one.name}"): one for one in PowerShare}


def to_budget(body: str) -> PowerBudget:
    """The budget of a stored spec. Raises InvalidArgumentError for an invalid node name."""
    spec = Parse(body, api.PowerBudgetSpec())
    path = "power_budget.spec.nodes"
    return PowerBudget(
        spec.watts,
        tuple(names.parse(names.NODE, one, path)["node"] for one in spec.nodes),
        tuple(sorted(spec.node_labels.items())),
        spec.per,
        _SHARES.get(spec.share, PowerShare.EQUAL),
    )


@dataclass(frozen=True, slots=True)
class PowerServicer(api.PowerServiceServicer):
    """The RPCs. Requests are already validated and callers authenticated."""

    powering: Powering
    rebalancing: Rebalancing

    async def CreatePowerBudget(
        self, request: api.CreatePowerBudgetRequest, context: Context
    ) -> api.CreatePowerBudgetResponse:
        made = await create_declared(self.powering.budgets, request.power_budget, request)
        return api.CreatePowerBudgetResponse(power_budget=self._budget(made))

    async def GetPowerBudget(
        self, request: api.GetPowerBudgetRequest, context: Context
    ) -> api.GetPowerBudgetResponse:
        found = self.powering.budgets.get(names.parse(names.BUDGET, request.name)["budget"])
        return api.GetPowerBudgetResponse(power_budget=self._budget(found))

    async def ListPowerBudgets(
        self, request: api.ListPowerBudgetsRequest, context: Context
    ) -> api.ListPowerBudgetsResponse:
        every = self.powering.budgets.every()
        found, token = listed(every, request, api.PowerBudget, key=lambda one: one.id, encode=self._budget)
        return api.ListPowerBudgetsResponse(power_budgets=found, next_page_token=token)

    async def UpdatePowerBudget(
        self, request: api.UpdatePowerBudgetRequest, context: Context
    ) -> api.UpdatePowerBudgetResponse:
        changed = await update_declared(self.powering.budgets, request.power_budget, request)
        return api.UpdatePowerBudgetResponse(power_budget=self._budget(changed))

    async def DeletePowerBudget(
        self, request: api.DeletePowerBudgetRequest, context: Context
    ) -> api.DeletePowerBudgetResponse:
        with wire.absence_allowed(request):
            key = names.parse(names.BUDGET, request.name)["budget"]
            await self.powering.budgets.delete(key, etag=request.etag)
        return api.DeletePowerBudgetResponse()

    async def ListPowerChanges(
        self, request: api.ListPowerChangesRequest, context: Context
    ) -> api.ListPowerChangesResponse:
        found, token = listed(
            self.powering.changes(),
            request,
            api.PowerChange,
            key=lambda one: f"{one[0]:020}",
            encode=_change,
            descending=True,
        )
        return api.ListPowerChangesResponse(power_changes=found, next_page_token=token)

    async def TakePowerCaps(
        self, request: api.TakePowerCapsRequest, context: Context
    ) -> api.TakePowerCapsResponse:
        told = {
            one.uuid: ToldGpu(
                or_else(one, "watts", None),
                or_else(one, "lowest_watts", None),
                or_else(one, "limit_watts", None),
                or_else(one, "cap_watts", None),
                or_else(one, "sm_activity_percent", None),
                one.problem,
            )
            for one in request.gpus
        }
        node = expect_own_node(request.node, "caps")
        caps = self.powering.take(node, told)
        ends = {
            one.order: PartitionEnd(one.problem, None if one.unsettled else frozenset(one.instances))
            for one in request.partition_ends
        }
        orders = self.rebalancing.partitioning.take(node, ends if request.partitions_gpus else None)
        return api.TakePowerCapsResponse(
            caps=[api.PowerCap(uuid=uuid, watts=watts) for uuid, watts in caps.items()],
            partitions=[
                api.PartitionOrder(order=one.id, uuid=one.uuid, profiles=one.profiles) for one in orders
            ],
        )

    def _budget(self, one: Declaration) -> api.PowerBudget:
        found, caps = self.powering.found, self.powering.found.caps
        message = api.PowerBudget(
            name=f"budgets/{one.id}",
            etag=one.etag,
            create_time=wire.to_timestamp(created(one)),
            sums=[
                api.PowerSum(
                    name=of.name,
                    drawn_watts=of.drawn,
                    room_watts=of.room,
                    gpu_count=len(of.gpus),
                    capped_count=sum(gpu.uuid in caps for gpu in of.gpus),
                    loose_count=of.loose,
                    emergency=of.emergency,
                )
                for of in found.sums
                if of.budget == one.id
            ],
        )
        Parse(one.body, message.spec)
        return message


def _change(numbered: tuple[int, PowerChange]) -> api.PowerChange:
    number, one = numbered
    return api.PowerChange(
        name=f"changes/{number}",
        gpu=one.gpu,
        before_watts=one.before,
        watts=one.after,
        power_budget=one.budget and f"budgets/{one.budget}",
        reason=one.reason,
        time=wire.to_timestamp(one.time),
        profiles=one.profiles,
    )
