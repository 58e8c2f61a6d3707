"""PolicyService, NotificationService and PowerService on the wire: messages to values, one use case, values to messages.

Use policies, notification targets and power budgets are declared alike: `create_declared` and `update_declared`.
"""

import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar
from zoneinfo import ZoneInfo

from google.protobuf.json_format import MessageToJson, Parse

from gpuscale.allocator.domain import use_policies
from gpuscale.allocator.domain.notifications import EventKind, Webhook
from gpuscale.allocator.domain.power import PowerBudget, PowerShare
from gpuscale.allocator.state.policies import Declaration, PowerChange
from gpuscale.allocator.usecases.declarations import Declarations
from gpuscale.allocator.usecases.notifying import Notifying, url_problem
from gpuscale.allocator.usecases.policing import DryRuns, Policing
from gpuscale.allocator.usecases.powering import Powering
from gpuscale.allocator.usecases.rebalancing import Rebalancing
from gpuscale.api.allocator import v1 as api
from gpuscale.common import names, wire
from gpuscale.common.errors import FieldViolation, InvalidArgumentError, PermissionDeniedError
from gpuscale.common.filters import listed
from gpuscale.common.rpc.validation import merged
from gpuscale.common.runtime.tasks import Clock
from gpuscale.common.security.auth import Context, Role, current_principal

DEFAULT_GRACE = 600.0
"""Default grace of a revocation, in seconds."""
DEFAULT_KILL_GRACE = 10.0
"""Default seconds from SIGTERM to SIGKILL."""
MOST_STANDINGS = 1000
DRY_RUN_SPAN = timedelta(days=7)
LEAST_SECRET = 16
_CONDITIONS = {
    api.UseCondition.Value(f"USE_CONDITION_{one.name}"): one for one in use_policies.PolicyCondition
}
_ACTIONS = {api.PolicyAction.Value(f"POLICY_ACTION_{one.name}"): one for one in use_policies.Action}
_ACTION_OF = {one: number for number, one in _ACTIONS.items()}
_OUTCOMES = {one: api.PolicyAct.Outcome.Value(f"OUTCOME_{one.name}") for one in use_policies.StageOutcome}
_EVENTS = {api.NotificationEvent.Value(f"NOTIFICATION_EVENT_{one.name}"): one for one in EventKind}
_EVENT_OF = {one: number for number, one in _EVENTS.items()}
_SHARES = {api.PowerShare.Value(f"POWER_SHARE_{one.name}"): one for one in PowerShare}
_TIME = re.compile(r"([01]\d|2[0-4]):([0-5]\d)")
_Given = api.UsePolicy | api.NotificationTarget | api.PowerBudget
_Resource = TypeVar("_Resource", api.UsePolicy, api.NotificationTarget, api.PowerBudget)


def to_policy(body: str) -> use_policies.UsePolicy:
    """The policy of a stored spec. Raises InvalidArgumentError if it contradicts itself."""
    spec = Parse(body, api.UsePolicySpec())
    stages: list[use_policies.PolicyStage] = []
    for one in spec.stages:
        grace = DEFAULT_KILL_GRACE if api.PolicyAction.POLICY_ACTION_KILL in one.actions else DEFAULT_GRACE
        if one.HasField("grace"):
            grace = wire.seconds(one.grace)
        actions = tuple(_ACTIONS[action] for action in one.actions)
        stages.append(use_policies.PolicyStage(wire.seconds(one.after), actions, grace))
    policy = use_policies.UsePolicy(
        condition=_CONDITIONS[spec.condition],
        stages=tuple(stages),
        scope=use_policies.Scope(
            tenants=tuple(spec.scope.tenants),
            holders=tuple(spec.scope.holders),
            labels=tuple(sorted(spec.scope.labels.items())),
            nodes=tuple(names.parse(names.NODE, one)["node"] for one in spec.scope.nodes),
            models=tuple(spec.scope.models),
            hours=tuple(
                _hours(one, f"use_policy.spec.scope.hours[{index}]")
                for index, one in enumerate(spec.scope.hours)
            ),
        ),
        all_gpus=not spec.any_gpu,
        exemptions=tuple(
            use_policies.Exemption((one.label, one.value), one.reason, wire.to_datetime(one.end_time))
            for one in spec.exemptions
        ),
        shadow=not spec.active,
    )
    if found := use_policies.problems(policy):
        violations = [FieldViolation(f"use_policy.spec.{path}", what) for path, what in found]
        path, what = found[0]
        raise InvalidArgumentError(f"use_policy.spec.{path} {what}", violations=violations)
    return policy


def _hours(message: api.WeeklyHours, path: str) -> use_policies.WeeklyHours:
    minutes: list[int] = []
    for name in ("begin", "end"):
        found = _TIME.fullmatch(getattr(message, name))
        minutes.append(int(found[1]) * 60 + int(found[2]) if found else -1)
        if not 0 <= minutes[-1] <= 24 * 60:
            field = f"{path}.{name}"
            raise InvalidArgumentError(f"{field} must be from 00:00 to 24:00", field=field)
    zone = message.time_zone or "UTC"
    try:
        ZoneInfo(zone)
    except (KeyError, ValueError, OSError):
        field = f"{path}.time_zone"
        raise InvalidArgumentError(f"{field}: this host knows no time zone {zone!r}", field=field) from None
    days = tuple(day - 1 for day in message.days) or tuple(range(7))
    return use_policies.WeeklyHours(days, minutes[0] % (24 * 60), minutes[1], zone)


def to_target(body: str) -> Webhook:
    """The target of a stored spec. Raises InvalidArgumentError for a missing or invalid address."""
    spec = Parse(body, api.NotificationTargetSpec())
    if problem := url_problem(spec.url):
        field = "notification_target.spec.url"
        raise InvalidArgumentError(f"{field} {problem}", field=field)
    if spec.secret and len(spec.secret) < LEAST_SECRET:
        field = "notification_target.spec.secret"
        raise InvalidArgumentError(f"{field} must have {LEAST_SECRET} characters or more", field=field)
    policies = frozenset(names.parse(names.POLICY, one)["policy"] for one in spec.policies)
    kinds = frozenset(_EVENTS[one] for one in spec.events)
    return Webhook(spec.url, spec.secret, kinds, frozenset(spec.holders), policies)


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
class PolicyServicer(api.PolicyServiceServicer):
    """The RPCs. Requests are already validated and callers authenticated."""

    policing: Policing
    dry_runs: DryRuns
    clock: Clock

    async def CreateUsePolicy(
        self, request: api.CreateUsePolicyRequest, context: Context
    ) -> api.CreateUsePolicyResponse:
        made = await create_declared(self.policing.policies, request.use_policy, request)
        return api.CreateUsePolicyResponse(use_policy=_policy(made))

    async def GetUsePolicy(
        self, request: api.GetUsePolicyRequest, context: Context
    ) -> api.GetUsePolicyResponse:
        key = names.parse(names.POLICY, request.name)["policy"]
        found, policy = self.policing.policies.get(key), self.policing.policies.spec(key)
        answer = api.GetUsePolicyResponse(use_policy=_policy(found))
        if policy is None:
            return answer
        for track in self.policing.standings(key)[:MOST_STANDINGS]:
            due = track.next_due(policy)
            standing = answer.standings.add(
                subject=track.subject.name,
                message=track.what,
                begin_time=wire.to_timestamp(track.began),
                held=wire.to_duration(track.held),
                paused=not track.counting,
                done_count=track.done,
                next_actions=[] if due is None else _actions(policy.stages[track.done].actions),
                exempt=track.spared,
            )
            if due is not None:
                left = max(0.0, due - (self.clock.now() - track.seen))
                wire.put_timestamp(standing.next_time, self.clock.wall() + timedelta(seconds=left))
        return answer

    async def ListUsePolicies(
        self, request: api.ListUsePoliciesRequest, context: Context
    ) -> api.ListUsePoliciesResponse:
        found, token = listed(
            self.policing.policies.every(), request, api.UsePolicy, key=lambda one: one.id, encode=_policy
        )
        return api.ListUsePoliciesResponse(use_policies=found, next_page_token=token)

    async def UpdateUsePolicy(
        self, request: api.UpdateUsePolicyRequest, context: Context
    ) -> api.UpdateUsePolicyResponse:
        changed = await update_declared(self.policing.policies, request.use_policy, request)
        return api.UpdateUsePolicyResponse(use_policy=_policy(changed))

    async def DeleteUsePolicy(
        self, request: api.DeleteUsePolicyRequest, context: Context
    ) -> api.DeleteUsePolicyResponse:
        with wire.absence_allowed(request):
            key = names.parse(names.POLICY, request.name)["policy"]
            await self.policing.policies.delete(key, etag=request.etag)
        return api.DeleteUsePolicyResponse()

    async def ListPolicyActs(
        self, request: api.ListPolicyActsRequest, context: Context
    ) -> api.ListPolicyActsResponse:
        found, token = listed(
            self.policing.acts(),
            request,
            api.PolicyAct,
            key=lambda one: f"{one[0]:020}",
            encode=lambda one: _act(one[1], one[0]),
            descending=True,
        )
        return api.ListPolicyActsResponse(policy_acts=found, next_page_token=token)

    async def DryRunUsePolicy(
        self, request: api.DryRunUsePolicyRequest, context: Context
    ) -> api.DryRunUsePolicyResponse:
        policy, key = to_policy(_body(request.use_policy)), names.parse(names.POLICY, request.use_policy.name)
        end = wire.to_datetime(request.end_time) if request.HasField("end_time") else self.clock.wall()
        start = wire.to_datetime(request.start_time) if request.HasField("start_time") else end - DRY_RUN_SPAN
        found, use = await self.dry_runs.run(key["policy"], policy, start.timestamp(), end.timestamp())
        begin = datetime.fromtimestamp(use.start, UTC)
        return api.DryRunUsePolicyResponse(
            policy_acts=map(_act, found.acts[:MOST_STANDINGS]),
            act_count=len(found.acts),
            start_time=wire.to_timestamp(begin),
            end_time=wire.to_timestamp(begin + timedelta(seconds=use.count * use.step)),
            step=wire.to_duration(use.step),
            subject_count=found.subjects,
            known=wire.to_duration(found.known),
            unknown=wire.to_duration(found.unknown),
            complete_since=wire.optional_timestamp(await self.policing.records.kept_since()),
        )

    async def TakeKillOrders(
        self, request: api.TakeKillOrdersRequest, context: Context
    ) -> api.TakeKillOrdersResponse:
        node = expect_own_node(request.node, "orders")
        results = [(one.order, one.problem) for one in request.results]
        return api.TakeKillOrdersResponse(orders=self.policing.orders.take(node, results))


@dataclass(frozen=True, slots=True)
class NotificationServicer(api.NotificationServiceServicer):
    """The RPCs. Requests are already validated and callers authenticated."""

    notifying: Notifying

    async def CreateNotificationTarget(
        self, request: api.CreateNotificationTargetRequest, context: Context
    ) -> api.CreateNotificationTargetResponse:
        made = await create_declared(self.notifying.targets, request.notification_target, request)
        return api.CreateNotificationTargetResponse(notification_target=_target(made))

    async def GetNotificationTarget(
        self, request: api.GetNotificationTargetRequest, context: Context
    ) -> api.GetNotificationTargetResponse:
        found = self.notifying.targets.get(names.parse(names.TARGET, request.name)["target"])
        return api.GetNotificationTargetResponse(notification_target=_target(found))

    async def ListNotificationTargets(
        self, request: api.ListNotificationTargetsRequest, context: Context
    ) -> api.ListNotificationTargetsResponse:
        found, token = listed(
            self.notifying.targets.every(),
            request,
            api.NotificationTarget,
            key=lambda one: one.id,
            encode=_target,
        )
        return api.ListNotificationTargetsResponse(notification_targets=found, next_page_token=token)

    async def UpdateNotificationTarget(
        self, request: api.UpdateNotificationTargetRequest, context: Context
    ) -> api.UpdateNotificationTargetResponse:
        changed = await update_declared(self.notifying.targets, request.notification_target, request)
        return api.UpdateNotificationTargetResponse(notification_target=_target(changed))

    async def DeleteNotificationTarget(
        self, request: api.DeleteNotificationTargetRequest, context: Context
    ) -> api.DeleteNotificationTargetResponse:
        with wire.absence_allowed(request):
            key = names.parse(names.TARGET, request.name)["target"]
            await self.notifying.targets.delete(key, etag=request.etag)
        return api.DeleteNotificationTargetResponse()

    async def ListNotifications(
        self, request: api.ListNotificationsRequest, context: Context
    ) -> api.ListNotificationsResponse:
        found, token = listed(
            self.notifying.every(),
            request,
            api.Notification,
            key=lambda one: f"{one.number:020}",
            encode=lambda one: api.Notification(
                name=f"targets/{one.target}/notifications/{one.number}",
                event=_EVENT_OF[one.event.kind],
                text=one.event.text,
                subject=one.event.subject,
                time=wire.to_timestamp(one.event.time),
                attempt_count=one.attempts,
                problem=one.problem,
                dead=one.dead,
            ),
        )
        return api.ListNotificationsResponse(notifications=found, next_page_token=token)


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
        node = expect_own_node(request.node, "caps")
        caps = self.powering.take(node, {one.uuid: one for one in request.gpus})
        ends = {one.order: one for one in request.partition_ends}
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
            sums=[
                api.PowerSum(
                    name=of.name,
                    drawn_watts=of.drawn,
                    room_watts=of.room,
                    gpu_count=len(of.gpus),
                    capped_count=sum(gpu.uuid in caps for gpu in of.gpus),
                    loose_count=sum(not gpu.helped for gpu in of.gpus),
                    emergency=of.emergency,
                )
                for of in found.sums
                if of.budget == one.id
            ],
        )
        return _declared(message, one, "budgets")


def expect_own_node(name: str, what: str) -> str:
    """The id of a node that the caller may act for: its own, or any for an admin. Raises PermissionDeniedError."""
    node, caller = names.parse(names.NODE, name, "node")["node"], current_principal()
    if caller.role is not Role.ADMIN and caller.name != node:
        raise PermissionDeniedError(
            f"{caller.name} may only take the {what} of the node of that name", reason="NOT_YOUR_NODE"
        )
    return node


def _id(name: str) -> str:
    return name.partition("/")[2]


async def create_declared(of: Declarations[Any], given: _Given, request: Any) -> Declaration:
    """Create the resource of a request."""
    return await of.create(
        _id(given.name), _body(given), request_id=request.request_id, validate_only=request.validate_only
    )


async def update_declared(of: Declarations[Any], given: _Given, request: Any) -> Declaration:
    """Update the resource of a request: masked fields change; address and secret stay if not given."""

    def change(body: str) -> str:
        stored: Any = type(given)(name=given.name)
        Parse(body, stored.spec)
        kept, current = deepcopy(stored), deepcopy(merged(stored, given, request.update_mask))
        if isinstance(current, api.NotificationTarget):
            current.spec.url = current.spec.url or kept.spec.url
            current.spec.secret = current.spec.secret or kept.spec.secret
        return _body(current)

    return await of.update(_id(given.name), change, etag=given.etag, validate_only=request.validate_only)


def _body(given: _Given) -> str:
    return MessageToJson(given.spec, indent=None, sort_keys=True)


def _declared(message: _Resource, one: Declaration, collection: str) -> _Resource:
    message.name, message.etag = f"{collection}/{one.id}", one.etag
    wire.put_timestamp(message.create_time, datetime.fromtimestamp(one.create_time, UTC))
    Parse(one.body, message.spec)
    return message


def _policy(one: Declaration) -> api.UsePolicy:
    return _declared(api.UsePolicy(), one, "policies")


def _target(one: Declaration) -> api.NotificationTarget:
    message = _declared(api.NotificationTarget(), one, "targets")
    message.host = message.spec.url.split("/")[2]
    message.signed = bool(message.spec.secret)
    message.spec.ClearField("url")
    message.spec.ClearField("secret")
    return message


def _actions(actions: Sequence[use_policies.Action]) -> list[api.PolicyAction.ValueType]:
    return [_ACTION_OF[one] for one in actions]


def _act(one: use_policies.PolicyAct, number: int | None = None) -> api.PolicyAct:
    return api.PolicyAct(
        name="" if number is None else f"policies/{one.policy}/acts/{number}",
        policy=f"policies/{one.policy}",
        subject=one.subject,
        reservations=map(names.reservation_name, one.reservations),
        stage=one.stage + 1,
        actions=_actions(one.actions),
        outcome=_OUTCOMES[one.outcome],
        held=wire.to_duration(one.held),
        reason=one.reason,
        time=wire.to_timestamp(one.time),
    )


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
