"""Use policies and notification targets, as an admin sets them in a test, and time that passes minute by minute."""

from collections.abc import Awaitable, Callable
from uuid import uuid4

import grpc

from gpuscale.api.allocator import v1 as api
from gpuscale.common.rpc.status import rpc_errors
from tests.support.allocator import Client, Reservation
from tests.support.clock import ManualClock
from tests.support.waiting import eventually

NOTE, NOTIFY = api.PolicyAction.POLICY_ACTION_NOTE, api.PolicyAction.POLICY_ACTION_NOTIFY
REVOKE, KILL = api.PolicyAction.POLICY_ACTION_REVOKE, api.PolicyAction.POLICY_ACTION_KILL
SECRET = "a secret of this test"


def idle_policy(*, active: bool = True, **spec: object) -> api.UsePolicy:
    stages = [
        api.PolicyStage(after={"seconds": 3600}, actions=[NOTE, NOTIFY]),
        api.PolicyStage(after={"seconds": 7200}, actions=[REVOKE, NOTIFY], grace={"seconds": 600}),
    ]
    of = {"condition": api.UseCondition.USE_CONDITION_IDLE, "stages": stages, "active": active, **spec}
    return api.UsePolicy(name="policies/idle", spec=api.UsePolicySpec(**of))


class Admin:
    """Who sets policies and targets, and lets time pass."""

    def __init__(self, channel: grpc.aio.Channel, clock: ManualClock) -> None:
        self.policies = api.PolicyServiceStub(channel)
        self.notifications = api.NotificationServiceStub(channel)
        self.nodes = api.NodeServiceStub(channel)
        self.clock = clock

    async def put(self, policy: api.UsePolicy) -> api.UsePolicy:
        request = api.CreateUsePolicyRequest(use_policy=policy, request_id=str(uuid4()))
        with rpc_errors():
            return (await self.policies.CreateUsePolicy(request, timeout=60)).use_policy

    async def target(self, url: str, **spec: object) -> api.NotificationTarget:
        target = api.NotificationTarget(
            name="targets/lab", spec=api.NotificationTargetSpec(url=url, secret=SECRET, **spec)
        )
        request = api.CreateNotificationTargetRequest(notification_target=target, request_id=str(uuid4()))
        with rpc_errors():
            return (
                await self.notifications.CreateNotificationTarget(request, timeout=60)
            ).notification_target

    async def acts(self, **asked: object) -> list[api.PolicyAct]:
        request = api.ListPolicyActsRequest(**asked)
        return list((await self.policies.ListPolicyActs(request, timeout=60)).policy_acts)

    async def standings(self, name: str = "policies/idle") -> list[api.PolicyStanding]:
        found = await self.policies.GetUsePolicy(api.GetUsePolicyRequest(name=name), timeout=60)
        return list(found.standings)

    async def letters(self) -> list[api.Notification]:
        found = await self.notifications.ListNotifications(api.ListNotificationsRequest(), timeout=60)
        return list(found.notifications)

    async def drain(self) -> None:
        request = api.DrainNodeRequest(name="nodes/n0", grace={"seconds": 3600})
        await self.nodes.DrainNode(request, timeout=60)

    async def pass_time(self, minutes: int, meanwhile: Callable[[], Awaitable[None]] | None = None) -> None:
        """Minute by minute, so that each is looked at, after what comes to pass in each."""
        for _ in range(minutes):
            before = {one.subject: one.held.seconds for one in await self.standings()}
            self.clock.advance(60)
            if meanwhile:
                await meanwhile()

            async def looked(before: dict[str, int] = before) -> bool:
                now = await self.standings()
                return all(one.paused or one.held.seconds > before.get(one.subject, -1) for one in now)

            await eventually(looked, interval=0.002)


async def noted(client: Client, one: Reservation) -> Reservation | None:
    found = await client.get(one.name)
    return found if found.notes else None


async def revoked(client: Client, one: Reservation) -> Reservation | None:
    found = await client.get(one.name)
    return found if found.HasField("revoke_time") else None
