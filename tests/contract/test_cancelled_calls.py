"""Every RPC that changes something, cancelled at every await: what the service then answers is what a restart answers.

The RPCs come from the descriptors: one that is added later fails here until it has a case, or a reason to have none.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from uuid import UUID

import pytest
from google.protobuf import duration_pb2, timestamp_pb2
from google.protobuf.message import Message

from gpuscale.allocator.app import open_allocator
from gpuscale.allocator.settings import AllocatorSettings
from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.autoscaler.app import open_autoscaler
from gpuscale.autoscaler.settings import AutoscalerSettings
from gpuscale.autoscaler.signals.brokers import BrokerSettings
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.secrets import SecretUrl
from gpuscale.common.wire import to_duration, to_timestamp
from gpuscale.internal.autoscaler import v1 as autoscaler_internal
from gpuscale.monitor.agent.sources import simulated_uuid
from gpuscale.monitor.app.agent import open_agent
from gpuscale.monitor.app.fleet import open_fleet
from gpuscale.monitor.app.settings import AgentSettings, FleetSettings
from tests.contract.cancelling import RefusedError, Room, copied, opened
from tests.contract.descriptors import Rpc, rpcs
from tests.support.autoscaler_app import scaling
from tests.support.clock import WALL_START, ManualClock
from tests.support.fake_fleet import FakeFleet, node_message, serving
from tests.support.monitor import confirming_allocator
from tests.support.monitor_values import hello, snapshot, telemetry
from tests.support.waiting import eventually

NODES = 16
MOST_AWAITS = 40
UUIDS = itertools.count(1)

Prepare: TypeAlias = Callable[[Room, int], Awaitable[Sequence[Message]]]
"""Makes what the call of that number changes, and returns what the call sends."""

READS = ("Get", "List", "Watch", "Query", "Read", "Check", "WaitFor", "Explain", "Estimate", "Rank", "Render")
READS_TOO = ("Verify", "Plan", "Evaluate", "Backtest", "StreamIsActive", "StreamMetricSpec", "IsActive")
NOTHING_ON_DISK = {
    "StreamTelemetry": "agents tell the fleet anew after a restart",
    "ForgetNode": "the fleet keeps no nodes",
    "ClearQuarantine": "changed without an await, and kept with the next save",
    **dict.fromkeys(("CreateJoinToken", "DeleteJoinToken", "Join"), "a restart forgets join tokens"),
    "ApplyRebalance": "a restart takes moves back",
    "RenewCertificate": "signs, and keeps nothing",
    "FollowFiles": "signs, and keeps nothing",
    **dict.fromkeys(("CreateLoginCode", "Login"), "a restart forgets one-time codes"),
    "TakePowerCaps": "says what is to be, and keeps nothing",
    "TakeKillOrders": "a restart gives no order that was given before",
    "DryRunUsePolicy": "asks what would have been, and keeps nothing",
    "ReleaseDriver": "a restarted agent takes the driver",
    "ResumeDriver": "a restarted agent takes the driver",
    "ReportMetrics": "metrics are reported anew",
    "Connect": "adapters report anew; what they reported is read from the disk",
}


def mutating(rpc: Rpc) -> bool:
    return not rpc.method.name.startswith(READS + READS_TOO)


MUTATING = {rpc.method.name: rpc.path for rpc in rpcs() if mutating(rpc)}


def new_id() -> str:
    return str(UUID(int=next(UUIDS)))


# The allocator.


def reserve_request(_: int = 0, node: str = "n0") -> allocator_api.ReserveRequest:
    return allocator_api.ReserveRequest(
        request_id=new_id(),
        holder="me",
        ttl=to_duration(300),
        ask=allocator_api.Ask(gpu_count=1, nodes=[f"nodes/{node}"]),
    )


async def reserved(room: Room, node: str = "n0") -> allocator_api.Reservation:
    found: allocator_api.Reservation = (
        await room.call(MUTATING["Reserve"], reserve_request(node=node))
    ).reservation
    return found


async def a_reserve(_: Room, number: int) -> Sequence[Message]:
    return [reserve_request(number)]


async def a_batch(_: Room, number: int) -> Sequence[Message]:
    return [allocator_api.BatchReserveRequest(requests=[reserve_request(number), reserve_request(number)])]


async def a_wait(_: Room, number: int) -> Sequence[Message]:
    request = reserve_request(number)
    request.wait.CopyFrom(to_duration(5))
    return [allocator_api.ReserveAndWatchRequest(reserve=request)]


async def a_renewal(room: Room, _: int) -> Sequence[Message]:
    one = await reserved(room)
    return [allocator_api.RenewReservationRequest(name=one.name, fence=one.fence, ttl=to_duration(900))]


async def a_keep_alive(room: Room, _: int) -> Sequence[Message]:
    one = await reserved(room)
    lease = allocator_api.LeaseRenewal(name=one.name, fence=one.fence)
    return [allocator_api.KeepAliveRequest(leases=[lease])]


async def a_release(room: Room, _: int) -> Sequence[Message]:
    one = await reserved(room)
    return [allocator_api.ReleaseReservationRequest(name=one.name, fence=one.fence)]


async def a_batch_release(room: Room, number: int) -> Sequence[Message]:
    requests: list[Any] = [one for _ in range(2) for one in await a_release(room, number)]
    return [allocator_api.BatchReleaseRequest(requests=requests)]


async def a_booking(_: Room, number: int) -> Sequence[Message]:
    booking = allocator_api.Booking(
        ask=allocator_api.Ask(gpu_count=1),
        start_time=to_timestamp(WALL_START + timedelta(days=number + 1)),
        duration=to_duration(3600),
    )
    request_id = str(UUID(int=next(UUIDS)))
    return [
        allocator_api.CreateBookingRequest(booking=booking, request_id=request_id, booking_id=f"b{number}")
    ]


async def a_quota(_: Room, number: int) -> Sequence[Message]:
    quota = allocator_api.Quota(tenant=f"t{number}", gpu_milli_limit=500)
    return [allocator_api.SetQuotaRequest(quota=quota)]


def node_of(number: int) -> str:
    return f"n{number % (NODES - 1) + 1}"


async def a_cordon(_: Room, number: int) -> Sequence[Message]:
    return [allocator_api.CordonNodeRequest(name=f"nodes/{node_of(number)}", reason=f"number {number}")]


async def a_drain(room: Room, number: int) -> Sequence[Message]:
    node = node_of(number)
    await room.call(MUTATING["UncordonNode"], allocator_api.UncordonNodeRequest(name=f"nodes/{node}"))
    await reserved(room, node)
    return [allocator_api.DrainNodeRequest(name=f"nodes/{node}", grace=to_duration(100 + number))]


def policy(number: int, *, active: bool = False) -> allocator_api.UsePolicy:
    stage = allocator_api.PolicyStage(actions=[allocator_api.PolicyAction.POLICY_ACTION_NOTE])
    condition = allocator_api.UseCondition.USE_CONDITION_OVER_USE
    spec = allocator_api.UsePolicySpec(condition=condition, stages=[stage], active=active)
    return allocator_api.UsePolicy(name=f"policies/p{number}", spec=spec)


async def a_policy(_: Room, number: int) -> Sequence[Message]:
    return [allocator_api.CreateUsePolicyRequest(use_policy=policy(number), request_id=new_id())]


def budget(number: int, watts: float = 900) -> allocator_api.PowerBudget:
    spec = allocator_api.PowerBudgetSpec(watts=watts, nodes=["nodes/none"])
    return allocator_api.PowerBudget(name=f"budgets/b{number}", spec=spec)


async def a_budget(_: Room, number: int) -> Sequence[Message]:
    return [allocator_api.CreatePowerBudgetRequest(power_budget=budget(number), request_id=new_id())]


def target(number: int, path: str = "") -> allocator_api.NotificationTarget:
    spec = allocator_api.NotificationTargetSpec(url=f"http://192.0.2.1/{path}")
    return allocator_api.NotificationTarget(name=f"targets/t{number}", spec=spec)


async def a_target(_: Room, number: int) -> Sequence[Message]:
    made = target(number)
    return [allocator_api.CreateNotificationTargetRequest(notification_target=made, request_id=new_id())]


async def a_letter(room: Room, number: int) -> Sequence[Message]:
    await room.call(MUTATING["CreateNotificationTarget"], *await a_target(room, number))
    await room.call(MUTATING["DrainNode"], *await a_drain(room, number))
    path = MUTATING["ResendNotification"].replace("ResendNotification", "ListNotifications")
    request = allocator_api.ListNotificationsRequest(filter=f'name = "targets/t{number}/*"')
    found = (await room.call(path, request)).notifications
    return [allocator_api.ResendNotificationRequest(name=found[0].name)]


# The autoscaler.


def watcher(number: int, queue: str = "q") -> autoscaler_api.QueueWatcher:
    return autoscaler_api.QueueWatcher(
        name=f"watchers/w{number}", spec=autoscaler_api.QueueWatcherSpec(broker="default", queue=queue)
    )


async def a_watcher(_: Room, number: int) -> Sequence[Message]:
    return [autoscaler_api.CreateQueueWatcherRequest(queue_watcher=watcher(number), request_id=new_id())]


def endpoint(number: int, reads: int) -> autoscaler_api.Endpoint:
    found = scaling(name=f"e{number}", tick=60)
    found.spec.signals[0].queue.watcher = f"watchers/w{reads}"
    return found


async def an_endpoint(room: Room, number: int) -> Sequence[Message]:
    for one in (2 * number, 2 * number + 1):
        await room.call(MUTATING["CreateQueueWatcher"], *await a_watcher(room, one))
    return [autoscaler_api.CreateEndpointRequest(endpoint=endpoint(number, 2 * number), request_id=new_id())]


async def made_endpoint(room: Room, number: int) -> str:
    await room.call(MUTATING["CreateEndpoint"], *await an_endpoint(room, number))
    return f"endpoints/e{number}"


async def other_endpoint(room: Room, number: int) -> Sequence[Message]:
    await made_endpoint(room, number)
    return [autoscaler_api.UpdateEndpointRequest(endpoint=endpoint(number, 2 * number + 1))]


async def no_endpoint(room: Room, number: int) -> Sequence[Message]:
    return [autoscaler_api.DeleteEndpointRequest(name=await made_endpoint(room, number))]


async def replicas(room: Room, number: int) -> Sequence[Message]:
    return [autoscaler_api.SetReplicasRequest(name=await made_endpoint(room, number), replicas=2)]


async def a_rule(room: Room, number: int) -> Sequence[Message]:
    rule = autoscaler_api.Rule()
    rule.CopyFrom(endpoint(number, 0).spec.rules[0])
    rule.id = "third"
    return [autoscaler_api.CreateRuleRequest(parent=await made_endpoint(room, number), rule=rule)]


async def other_rule(room: Room, number: int) -> Sequence[Message]:
    rule = autoscaler_api.Rule()
    rule.CopyFrom(endpoint(number, 0).spec.rules[0])
    rule.disabled = True
    name = await made_endpoint(room, number)
    return [autoscaler_api.UpdateRuleRequest(name=f"{name}/rules/{rule.id}", rule=rule)]


async def no_rule(room: Room, number: int) -> Sequence[Message]:
    name = await made_endpoint(room, number)
    return [autoscaler_api.DeleteRuleRequest(name=f"{name}/rules/up")]


async def no_adapter(room: Room, number: int) -> Sequence[Message]:
    register = autoscaler_internal.Register(
        adapter=f"a{number}", kind="process", node="n0", templates=["worker"]
    )
    path = "/gpuscale.internal.autoscaler.v1.AdapterStreamService/Connect"
    await room.call(path, autoscaler_internal.ConnectRequest(register=register))
    return [autoscaler_api.ForgetAdapterRequest(name=f"adapters/a{number}")]


async def a_backtest(_: Room, number: int) -> Sequence[Message]:
    preset = autoscaler_api.BacktestPolicy(name="p", preset=autoscaler_api.PresetWish(preset="keda"))
    workload = autoscaler_api.Workload(arrivals=[0.0], service_seconds=[1.0])
    return [
        autoscaler_api.CreateBacktestRequest(
            spec=autoscaler_api.BacktestSpec(policies=[preset]),
            request_id=new_id(),
            backtest_id=f"b{number}",
            workload=workload,
        )
    ]


# The fleet and the agent.


async def a_recording(_: Room, number: int) -> Sequence[Message]:
    return [
        monitor_api.StartRecordingRequest(
            request_id=new_id(), recording_id=f"r{number}", names=["nodes/alpha"]
        )
    ]


ADMITTED = [simulated_uuid("alpha", index) for index in range(8)]


async def work(_: Room, number: int) -> Sequence[Message]:
    uuids = ADMITTED[number % 8 :][:1]
    return [monitor_api.AdmitWorkRequest(gpu_uuids=uuids, fence=100, reservation="reservations/r100")]


class PromptThread(ThreadPoolExecutor):
    """Has begun what it is given: a caller who gives up leaves it under way, and what comes next waits for it."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        begun = threading.Event()
        future = super().submit(lambda: (begun.set(), work(*args, **kwargs))[1])
        begun.wait()
        return future


@asynccontextmanager
async def an_allocator(state: Path, clock: ManualClock) -> AsyncGenerator[Room]:
    fleet = FakeFleet(
        *(node_message(f"n{index}", count=4 if index else 64, period=3600) for index in range(NODES))
    )
    settings = AllocatorSettings(data_dir=state)
    async with (
        serving(fleet) as address,
        open_channel(address) as channel,
        opened(open_allocator(settings, fleet=channel, clock=clock)) as room,
    ):

        async def ready() -> bool:
            path = "/gpuscale.api.allocator.v1.CapacityService/RankNodes"
            await room.call(path, allocator_api.RankNodesRequest())
            return True

        await eventually(ready, retry_on=(RefusedError,))
        yield room


@asynccontextmanager
async def an_autoscaler(state: Path, clock: ManualClock) -> AsyncGenerator[Room]:
    broker = BrokerSettings(amqp_url=SecretUrl("amqp://u:p@127.0.0.1:1/"))
    settings = AutoscalerSettings(data_dir=state, brokers={"default": broker})
    async with (
        open_channel("127.0.0.1:1") as nobody,
        opened(open_autoscaler(settings, fleet=nobody, allocator=nobody, clock=clock)) as room,
    ):
        yield room


@asynccontextmanager
async def a_fleet(state: Path, clock: ManualClock) -> AsyncGenerator[Room]:
    async with opened(open_fleet(FleetSettings(data_dir=state), clock=clock)) as room:
        await room.call(MUTATING["StreamTelemetry"], telemetry(hello()), telemetry(snapshot()))
        yield room


@asynccontextmanager
async def an_agent(state: Path, clock: ManualClock) -> AsyncGenerator[Room]:
    settings = AgentSettings(
        node="alpha", source="simulated", period_seconds=0.25, state_dir=state, simulated_gpu_count=8
    )
    asyncio.get_running_loop().set_default_executor(PromptThread(1))
    async with (
        confirming_allocator() as allocator,
        opened(open_agent(settings, fleet=None, allocator=allocator, clock=clock)) as room,
    ):
        path = "/gpuscale.api.monitor.v1.AgentService/GetSnapshot"
        await room.call(path, monitor_api.GetSnapshotRequest())
        yield room


Opening: TypeAlias = Callable[[Path, ManualClock], Any]
FIRST: Mapping[str, tuple[Opening, Prepare]] = {
    "Reserve": (an_allocator, a_reserve),
    "ReserveAndWatch": (an_allocator, a_wait),
    "BatchReserve": (an_allocator, a_batch),
    "RenewReservation": (an_allocator, a_renewal),
    "KeepAlive": (an_allocator, a_keep_alive),
    "ReleaseReservation": (an_allocator, a_release),
    "BatchRelease": (an_allocator, a_batch_release),
    "SetQuota": (an_allocator, a_quota),
    "CreateBooking": (an_allocator, a_booking),
    "CordonNode": (an_allocator, a_cordon),
    "DrainNode": (an_allocator, a_drain),
    "CreateUsePolicy": (an_allocator, a_policy),
    "CreatePowerBudget": (an_allocator, a_budget),
    "CreateNotificationTarget": (an_allocator, a_target),
    "ResendNotification": (an_allocator, a_letter),
    "CreateQueueWatcher": (an_autoscaler, a_watcher),
    "CreateEndpoint": (an_autoscaler, an_endpoint),
    "UpdateEndpoint": (an_autoscaler, other_endpoint),
    "DeleteEndpoint": (an_autoscaler, no_endpoint),
    "SetReplicas": (an_autoscaler, replicas),
    "CreateRule": (an_autoscaler, a_rule),
    "UpdateRule": (an_autoscaler, other_rule),
    "DeleteRule": (an_autoscaler, no_rule),
    "ForgetAdapter": (an_autoscaler, no_adapter),
    "CreateBacktest": (an_autoscaler, a_backtest),
    "StartRecording": (a_fleet, a_recording),
    "AdmitWork": (an_agent, work),
}
AFTER: Mapping[str, tuple[str, Callable[[int], Mapping[str, Any]]]] = {
    "CancelBooking": ("CreateBooking", lambda n: {"name": f"bookings/b{n}"}),
    "DeleteQuota": ("SetQuota", lambda n: {"tenant": f"t{n}"}),
    "UncordonNode": ("DrainNode", lambda n: {"name": f"nodes/{node_of(n)}"}),
    "UpdateUsePolicy": ("CreateUsePolicy", lambda n: {"use_policy": policy(n, active=True)}),
    "DeleteUsePolicy": ("CreateUsePolicy", lambda n: {"name": f"policies/p{n}"}),
    "UpdatePowerBudget": ("CreatePowerBudget", lambda n: {"power_budget": budget(n, 800)}),
    "DeletePowerBudget": ("CreatePowerBudget", lambda n: {"name": f"budgets/b{n}"}),
    "UpdateNotificationTarget": (
        "CreateNotificationTarget",
        lambda n: {"notification_target": target(n, "other")},
    ),
    "DeleteNotificationTarget": ("CreateNotificationTarget", lambda n: {"name": f"targets/t{n}"}),
    "UpdateQueueWatcher": ("CreateQueueWatcher", lambda n: {"queue_watcher": watcher(n, "other")}),
    "DeleteQueueWatcher": ("CreateQueueWatcher", lambda n: {"name": f"watchers/w{n}"}),
    "CancelBacktest": ("CreateBacktest", lambda n: {"name": f"backtests/b{n}"}),
    "DeleteBacktest": ("CreateBacktest", lambda n: {"name": f"backtests/b{n}"}),
    "StopRecording": ("StartRecording", lambda n: {"name": f"recordings/r{n}"}),
    "DeleteRecording": ("StartRecording", lambda n: {"name": f"recordings/r{n}"}),
    "ResetFences": ("AdmitWork", lambda n: {"gpu_uuids": ADMITTED[n % 8 :][:1]}),
}
"""Calls about what one of FIRST makes, and the fields of their requests."""
LAST: Mapping[Opening, tuple[str, Prepare]] = {
    an_allocator: ("SetQuota", a_quota),
    an_autoscaler: ("CreateQueueWatcher", a_watcher),
    a_fleet: ("StartRecording", a_recording),
}
"""What is written after all that is under way."""
LISTS = (
    "allocator.v1.AllocatorService/ListReservations",
    "allocator.v1.NodeService/ListCordons",
    "allocator.v1.QuotaService/ListQuotas",
    "allocator.v1.BookingService/ListBookings",
    "allocator.v1.PolicyService/ListUsePolicies",
    "allocator.v1.NotificationService/ListNotificationTargets",
    "autoscaler.v1.QueueWatcherService/ListQueueWatchers",
    "autoscaler.v1.EndpointService/ListEndpoints",
    "autoscaler.v1.RuleService/ListRules",
    "monitor.v1.RecordingService/ListRecordings",
)
VOLATILE = {"status", "next_page_token", "create_time", "update_time"}


def after(method: str, creation: str, fields: Callable[[int], Mapping[str, Any]]) -> tuple[Opening, Prepare]:
    opening, prepare = FIRST[creation]
    [request] = (rpc.request_class for rpc in rpcs() if rpc.method.name == method)

    async def prepared(room: Room, number: int) -> Sequence[Message]:
        await room.call(MUTATING[creation], *await prepare(room, number))
        return [request(**fields(number))]

    return opening, prepared


CASES = {**FIRST, **{method: after(method, *made) for method, made in AFTER.items()}}


async def answers(room: Room, count: int) -> list[str]:
    """What a room answers of all that so many calls left: each list, and whether a watcher may go and a fence is high enough."""
    found: list[str] = []
    if MUTATING["DeleteEndpoint"] in room.handlers:
        await eventually(partial(none_is_being_deleted, room))
    for path in (f"/gpuscale.api.{one}" for one in LISTS):
        if path in room.handlers:
            request = next(rpc.request_class for rpc in rpcs() if rpc.path == path)()
            for field, value in (("page_size", 1000), ("show_ended", True)):
                if field in request.DESCRIPTOR.fields_by_name:
                    setattr(request, field, value)
            answer = await room.call(path, request)
            forget_volatile(answer)
            found.append(f"{path} {answer}")
    if MUTATING["DeleteBacktest"] in room.handlers:  # a restart cuts those that have not ended
        path = "/gpuscale.api.autoscaler.v1.BacktestService/ListBacktests"
        listed = (await room.call(path, autoscaler_api.ListBacktestsRequest())).backtests
        found.append(" ".join(one.name for one in listed))
    for number in range(2 * count + 2 if MUTATING["DeleteQueueWatcher"] in room.handlers else 0):
        request = autoscaler_api.DeleteQueueWatcherRequest(name=f"watchers/w{number}")
        found.append(await told(room, "DeleteQueueWatcher", request))
    if MUTATING["AdmitWork"] in room.handlers:
        for uuid in ADMITTED:
            request = monitor_api.AdmitWorkRequest(gpu_uuids=[uuid], fence=1, reservation="reservations/r1")
            found.append(await told(room, "AdmitWork", request))
    return found


async def none_is_being_deleted(room: Room) -> bool:
    path = "/gpuscale.api.autoscaler.v1.EndpointService/ListEndpoints"
    for one in (await room.call(path, autoscaler_api.ListEndpointsRequest())).endpoints:
        request = autoscaler_api.UpdateEndpointRequest(endpoint=one, validate_only=True)
        if "is being deleted" in await told(room, "UpdateEndpoint", request):
            return False
    return True


async def told(room: Room, method: str, request: Message) -> str:
    try:
        return str(await room.call(MUTATING[method], request))
    except RefusedError as refused:
        return str(refused)


def forget_volatile(message: Any) -> None:
    for field, value in message.ListFields():
        if field.name in VOLATILE:
            message.ClearField(field.name)
        elif field.message_type and not field.message_type.GetOptions().map_entry:
            for one in value if field.is_repeated else [value]:
                if not isinstance(one, duration_pb2.Duration | timestamp_pb2.Timestamp):
                    forget_volatile(one)


def test_every_rpc_that_changes_something_has_a_case() -> None:
    assert {*CASES, *NOTHING_ON_DISK} == {*MUTATING}


@pytest.mark.parametrize("method", CASES)
async def test_memory_is_what_a_restart_finds(tmp_path: Path, method: str) -> None:
    opening, prepare = CASES[method]
    clock, state = ManualClock(), tmp_path / "state"
    state.mkdir(mode=0o700)
    async with opening(state, clock) as room:
        for number in range(1, MOST_AWAITS):
            requests = await prepare(room, number)
            clock.advance(opening is an_allocator)  # else a renewal would change nothing
            cancelled = await room.cancelled(number, MUTATING[method], *requests)
            if opening in LAST:
                last, change = LAST[opening]
                await room.call(MUTATING[last], *await change(room, 1000 + number))
            await asyncio.to_thread(int)
            kill = copied(state, tmp_path / f"kill {number}")
            seen = await answers(room, number)
            async with opening(kill, clock) as restarted:
                assert await answers(restarted, number) == seen
            if not cancelled:
                break
    assert number > 1, "it never waited"
