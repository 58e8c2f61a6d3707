"""Every RPC that changes something, cancelled at every await: what the service then answers is what a restart answers.

The RPCs come from the descriptors: one that is added later fails here until it has a case, or a reason to have none.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
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

Fields: TypeAlias = Mapping[str, Any]
Prepare: TypeAlias = Callable[[Room, int], Awaitable[Fields]]
"""Makes what the call of that number changes, and returns the fields of its request."""

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
REQUESTS = {rpc.method.name: rpc.request_class for rpc in rpcs() if mutating(rpc)}


def new_id() -> str:
    return str(UUID(int=next(UUIDS)))


async def call(room: Room, method: str, **fields: Any) -> Any:
    return await room.call(MUTATING[method], REQUESTS[method](**fields))


async def made(room: Room, method: str, number: int) -> Any:
    """What the case of a method makes with that number."""
    return await call(room, method, **await CASES[method][1](room, number))


# The allocator.


def reserving(node: str = "n0", **more: Any) -> Fields:
    ask = {"gpu_count": 1, "nodes": [f"nodes/{node}"]}
    return {"request_id": new_id(), "holder": "me", "ttl": timedelta(seconds=300), "ask": ask, **more}


async def a_release(room: Room, _: int) -> Fields:
    one = (await call(room, "Reserve", **reserving())).reservation
    return {"name": one.name, "fence": one.fence}


async def a_renewal(room: Room, number: int) -> Fields:
    return {**await a_release(room, number), "ttl": timedelta(seconds=900)}


async def a_keep_alive(room: Room, number: int) -> Fields:
    return {"leases": [await a_release(room, number)]}


async def a_batch_release(room: Room, number: int) -> Fields:
    return {"requests": [await a_release(room, number) for _ in range(2)]}


def booking(number: int) -> Fields:
    start = WALL_START + timedelta(days=number + 1)
    return {"ask": {"gpu_count": 1}, "start_time": start, "duration": timedelta(hours=1)}


def node_of(number: int) -> str:
    return f"n{number % (NODES - 1) + 1}"


async def a_drain(room: Room, number: int) -> Fields:
    node = node_of(number)
    await call(room, "UncordonNode", name=f"nodes/{node}")
    await call(room, "Reserve", **reserving(node))
    return {"name": f"nodes/{node}", "grace": timedelta(seconds=100 + number)}


def policy(number: int, *, active: bool = False) -> Fields:
    stages = [{"actions": ["POLICY_ACTION_NOTE"]}]
    spec = {"condition": "USE_CONDITION_OVER_USE", "stages": stages, "active": active}
    return {"name": f"policies/p{number}", "spec": spec}


def budget(number: int, watts: float = 900) -> Fields:
    return {"name": f"budgets/b{number}", "spec": {"watts": watts, "nodes": ["nodes/none"]}}


def target(number: int, host: str = "192.0.2.1") -> Fields:
    return {"name": f"targets/t{number}", "spec": {"url": f"http://{host}/"}}


# The autoscaler.


def watcher(number: int, queue: str = "q") -> Fields:
    return {"name": f"watchers/w{number}", "spec": {"broker": "default", "queue": queue}}


def endpoint(number: int, reads: int) -> autoscaler_api.Endpoint:
    found = scaling(name=f"e{number}", low=1, tick=60)
    found.spec.signals[0].queue.watcher = f"watchers/w{reads}"
    return found


def rule(number: int, **fields: Any) -> autoscaler_api.Rule:
    found = endpoint(number, 0).spec.rules[0]
    found.MergeFrom(autoscaler_api.Rule(**fields))
    return found


async def an_endpoint(room: Room, number: int) -> Fields:
    for one in (2 * number, 2 * number + 1):
        await made(room, "CreateQueueWatcher", one)
    return {"endpoint": endpoint(number, 2 * number), "request_id": new_id()}


async def no_adapter(room: Room, number: int) -> Fields:
    register = {"adapter": f"a{number}", "kind": "process", "node": "n0", "templates": ["worker"]}
    await call(room, "Connect", register=register)
    return {"name": f"adapters/a{number}"}


def backtest(number: int) -> Fields:
    workload = {"arrivals": [0.0], "service_seconds": [1.0]}
    spec = {"policies": [{"name": "p", "preset": {"preset": "keda"}}]}
    return {"spec": spec, "request_id": new_id(), "backtest_id": f"b{number}", "workload": workload}


# The fleet and the agent.


def recording(number: int) -> Fields:
    return {"request_id": new_id(), "recording_id": f"r{number}", "names": ["nodes/alpha"]}


ADMITTED = [simulated_uuid("alpha", index) for index in range(8)]


def admitted(number: int) -> Fields:
    return {"gpu_uuids": ADMITTED[number % 8 :][:1], "fence": 100, "reservation": "reservations/r100"}


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
FIRST: Mapping[str, tuple[Opening, Callable[[int], Fields]]] = {
    "Reserve": (an_allocator, lambda n: reserving(holder=f"me {n}")),
    "ReserveAndWatch": (an_allocator, lambda _: {"reserve": reserving(wait=timedelta(seconds=5))}),
    "BatchReserve": (an_allocator, lambda _: {"requests": [reserving(), reserving()]}),
    "SetQuota": (an_allocator, lambda n: {"quota": {"tenant": f"t{n}", "gpu_milli_limit": 500}}),
    "CreateBooking": (
        an_allocator,
        lambda n: {"booking": booking(n), "request_id": new_id(), "booking_id": f"b{n}"},
    ),
    "CordonNode": (an_allocator, lambda n: {"name": f"nodes/{node_of(n)}", "reason": f"number {n}"}),
    "CreateUsePolicy": (an_allocator, lambda n: {"use_policy": policy(n), "request_id": new_id()}),
    "CreatePowerBudget": (an_allocator, lambda n: {"power_budget": budget(n), "request_id": new_id()}),
    "CreateNotificationTarget": (
        an_allocator,
        lambda n: {"notification_target": target(n), "request_id": new_id()},
    ),
    "CreateQueueWatcher": (an_autoscaler, lambda n: {"queue_watcher": watcher(n), "request_id": new_id()}),
    "CreateBacktest": (an_autoscaler, backtest),
    "StartRecording": (a_fleet, recording),
    "AdmitWork": (an_agent, admitted),
}
"""Calls that need nothing, and the fields of their requests."""
PREPARED: Mapping[str, tuple[Opening, Prepare]] = {
    "RenewReservation": (an_allocator, a_renewal),
    "KeepAlive": (an_allocator, a_keep_alive),
    "ReleaseReservation": (an_allocator, a_release),
    "BatchRelease": (an_allocator, a_batch_release),
    "DrainNode": (an_allocator, a_drain),
    "CreateEndpoint": (an_autoscaler, an_endpoint),
    "ForgetAdapter": (an_autoscaler, no_adapter),
}
AFTER: Mapping[str, tuple[str, Callable[[int], Fields]]] = {
    "UpdateEndpoint": ("CreateEndpoint", lambda n: {"endpoint": endpoint(n, 2 * n + 1)}),
    "DeleteEndpoint": ("CreateEndpoint", lambda n: {"name": f"endpoints/e{n}"}),
    "SetReplicas": ("CreateEndpoint", lambda n: {"name": f"endpoints/e{n}", "replicas": 2}),
    "CreateRule": ("CreateEndpoint", lambda n: {"parent": f"endpoints/e{n}", "rule": rule(n, id="third")}),
    "UpdateRule": (
        "CreateEndpoint",
        lambda n: {"name": f"endpoints/e{n}/rules/up", "rule": rule(n, disabled=True)},
    ),
    "DeleteRule": ("CreateEndpoint", lambda n: {"name": f"endpoints/e{n}/rules/up"}),
    "CancelBooking": ("CreateBooking", lambda n: {"name": f"bookings/b{n}"}),
    "DeleteQuota": ("SetQuota", lambda n: {"name": f"quotas/t{n}"}),
    "UncordonNode": ("DrainNode", lambda n: {"name": f"nodes/{node_of(n)}"}),
    "UpdateUsePolicy": ("CreateUsePolicy", lambda n: {"use_policy": policy(n, active=True)}),
    "DeleteUsePolicy": ("CreateUsePolicy", lambda n: {"name": f"policies/p{n}"}),
    "UpdatePowerBudget": ("CreatePowerBudget", lambda n: {"power_budget": budget(n, 800)}),
    "DeletePowerBudget": ("CreatePowerBudget", lambda n: {"name": f"budgets/b{n}"}),
    "UpdateNotificationTarget": (
        "CreateNotificationTarget",
        lambda n: {"notification_target": target(n, "192.0.2.2")},  # answers tell the host
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
"""Calls about what another makes, and the fields of their requests."""
LAST = {an_allocator: "SetQuota", an_autoscaler: "CreateQueueWatcher", a_fleet: "StartRecording"}
"""What is written after all that is under way."""
LISTS = (
    "allocator.v1.AllocatorService/ListReservations",
    "allocator.v1.NodeService/ListCordons",
    "allocator.v1.QuotaService/ListQuotas",
    "allocator.v1.BookingService/ListBookings",
    "allocator.v1.PolicyService/ListUsePolicies",
    "allocator.v1.NotificationService/ListNotificationTargets",
    "allocator.v1.PowerService/ListPowerBudgets",
    "autoscaler.v1.QueueWatcherService/ListQueueWatchers",
    "autoscaler.v1.EndpointService/ListEndpoints",
    "autoscaler.v1.RuleService/ListRules",
    "monitor.v1.RecordingService/ListRecordings",
)
VOLATILE = {"status", "next_page_token", "create_time", "update_time"}


def first(opening: Opening, fields: Callable[[int], Fields]) -> tuple[Opening, Prepare]:
    async def prepared(_: Room, number: int) -> Fields:
        return fields(number)

    return opening, prepared


def after(creation: str, fields: Callable[[int], Fields]) -> tuple[Opening, Prepare]:
    async def prepared(room: Room, number: int) -> Fields:
        await made(room, creation, number)
        return fields(number)

    return {**FIRST, **PREPARED}[creation][0], prepared


CASES = {
    **PREPARED,
    **{method: first(*row) for method, row in FIRST.items()},
    **{method: after(*row) for method, row in AFTER.items()},
}


async def lists(room: Room) -> list[Any]:
    found: list[Any] = []
    for path in (f"/gpuscale.api.{one}" for one in LISTS):
        if path in room.handlers:
            request = next(rpc.request_class for rpc in rpcs() if rpc.path == path)()
            for field, value in (("page_size", 1000), ("show_ended", True)):
                if field in request.DESCRIPTOR.fields_by_name:
                    setattr(request, field, value)
            found.append(await room.call(path, request))
            forget_volatile(found[-1])
    return found


async def answers(room: Room, count: int) -> list[str]:
    """What a room answers of all that so many calls left: each list, and whether a watcher may go and a fence is high enough."""
    found: list[str] = []
    if MUTATING["DeleteEndpoint"] in room.handlers:
        await eventually(partial(none_is_being_deleted, room))
    found += map(str, await lists(room))
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


def forget_volatile(message: Any, names: Collection[str] = VOLATILE) -> None:
    for field, value in message.ListFields():
        if field.name in names:
            message.ClearField(field.name)
        elif field.message_type and not field.message_type.GetOptions().map_entry:
            for one in value if field.is_repeated else [value]:
                if not isinstance(one, duration_pb2.Duration | timestamp_pb2.Timestamp):
                    forget_volatile(one, names)


def test_every_rpc_that_changes_something_has_a_case() -> None:
    assert {*CASES, *NOTHING_ON_DISK} == {*MUTATING}


@pytest.mark.parametrize("method", CASES)
async def test_memory_is_what_a_restart_finds(tmp_path: Path, method: str) -> None:
    opening, prepare = CASES[method]
    clock, state = ManualClock(), tmp_path / "state"
    state.mkdir(mode=0o700)
    async with opening(state, clock) as room:
        for number in range(1, MOST_AWAITS):
            request = REQUESTS[method](**await prepare(room, number))
            clock.advance(opening is an_allocator)  # else a renewal would change nothing
            cancelled = await room.cancelled(number, MUTATING[method], request)
            if opening in LAST:
                await made(room, LAST[opening], 1000 + number)
            await asyncio.to_thread(int)
            kill = copied(state, tmp_path / f"kill {number}")
            seen = await answers(room, number)
            async with opening(kill, clock) as restarted:
                assert await answers(restarted, number) == seen
            if not cancelled:
                break
    assert number > 1, "it never waited"


REPEATED = [one for one in CASES if "request_id" in REQUESTS[one].DESCRIPTOR.fields_by_name]
REPEATED.remove("CreateBacktest")  # which goes on meanwhile


@pytest.mark.parametrize("method", REPEATED)
async def test_a_repeated_request_makes_nothing_anew_and_what_differs_from_it_is_refused(
    tmp_path: Path, method: str
) -> None:
    """Also after a kill. The same name is refused too, where the request has another id."""
    opening, prepare = CASES[method]
    clock, state, path = ManualClock(), tmp_path / "state", MUTATING[method]
    state.mkdir(mode=0o700)
    async with opening(state, clock) as room:
        one, other = [REQUESTS[method](**await prepare(room, number)) for number in (1, 2)]
        one.request_id = other.request_id = new_id()
        told_of_it: list[Any] = []
        for _ in range(2):
            told_of_it.append(await room.call(path, one))
            clock.advance(method != "StartRecording")  # which goes on meanwhile
        kill, seen = copied(state, tmp_path / "kill"), await answers(room, 2)
    async with opening(kill, clock) as restarted:
        told_of_it.append(await restarted.call(path, one))
        assert "ALREADY_EXISTS: REQUEST_ID_REUSED: " in await told(restarted, method, other)
        if method not in {"Reserve", "CreateRule"}:  # no name; the same rule is there already
            one.request_id = new_id()
            reason = "RECORDING_EXISTS" if method == "StartRecording" else "ALREADY_EXISTS"
            assert f"ALREADY_EXISTS: {reason}: " in await told(restarted, method, one)
        assert await answers(restarted, 2) == seen
    for answer in told_of_it:
        forget_volatile(answer, {"status", "remaining"})
    assert told_of_it == told_of_it[:1] * 3
