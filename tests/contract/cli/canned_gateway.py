"""A gateway that answers from a fixed world, for tests of what talks to one: two GPUs, a reservation, an endpoint.

Plain gRPC with threads, so that tests of sync code need no event loop. Names that do not exist, and requests that a test
wants refused, are answered with errors of the tree, as the real services do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from typing import Any, NoReturn

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.audit import v1 as audit_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.common import errors
from gpuscale.common.filters import compile_filter
from gpuscale.common.rpc.status import to_rpc_status
from gpuscale.common.runtime.tasks import read_boot_id

GIB = 1 << 30
LONG_AGO = Timestamp(seconds=1_700_000_000)
UUIDS = ("GPU-0000000a-0000-0000-0000-000000000000", "GPU-0000000b-0000-0000-0000-000000000000")


def gpu(index: int, **reading: Any) -> types_api.Gpu:
    return types_api.Gpu(
        name=f"nodes/host-1/gpus/{UUIDS[index].lower()}",
        uuid=UUIDS[index],
        index=index,
        model="Test GPU",
        simulated=True,
        state=types_api.GpuState.GPU_STATE_OK,
        reading=types_api.GpuReading(memory_total_bytes=80 * GIB, age=Duration(seconds=1), **reading),
    )


NODE = monitor_api.Node(
    name="nodes/host-1",
    state=monitor_api.NodeState.NODE_STATE_ONLINE,
    agent_version="0.1.0",
    snapshot=types_api.Snapshot(
        node="host-1",
        epoch="00000000-0000-0000-0000-000000000001",
        seq=7,
        age=Duration(seconds=1),
        simulated=True,
        host={"hostname": "host-1", "operating_system": "Linux 6.1", "boot_id": read_boot_id()},
        host_reading={
            "cpu_percent": 12.5, "cpu_count": 16, "load_1m": 0.5, "load_5m": 0.25, "load_15m": 0.125,
            "memory_used_bytes": 4 * GIB, "memory_total_bytes": 64 * GIB,
        },
        gpus=[
            gpu(0, utilization_percent=37.0, temperature_celsius=55.0, power_watts=210.5,
                memory_used_bytes=20 * GIB, memory_free_bytes=60 * GIB),
            gpu(1),
        ],
    ),
)  # fmt: skip
PROCESS = monitor_api.NodeProcess(
    name=f"{NODE.snapshot.gpus[0].name}/processes/4711",
    gpu=NODE.snapshot.gpus[0].name,
    process={
        "pid": 4711, "user": "ann", "program": "python train.py", "reservation": "reservations/r1",
        "memory_used_bytes": 20 * GIB, "utilization_percent": 61, "start_time": LONG_AGO,
    },
)  # fmt: skip
RESERVATION = allocator_api.Reservation(
    name="reservations/r1",
    holder="training",
    job={
        "title": "r1", "command": "python train.py", "state": "STATE_RUNNING",
        "members": [{"node": "nodes/host-1", "pid": 7}],
    },
    state="STATE_ACTIVE",
    fence=41,
    gpus=[
        {
            "name": f"nodes/host-1/gpus/{UUIDS[0].lower()}", "node": "host-1", "uuid": UUIDS[0],
            "model": "Test GPU", "simulated": True,
            "score": {
                "total": 0.702,
                "parts": [
                    {"name": "memory", "value": 0.75, "weight": 0.6},
                    {"name": "utilization", "value": 0.63, "weight": 0.4},
                ],
            },
        }
    ],
    ttl=Duration(seconds=60),
    remaining=Duration(seconds=42),
    create_time=LONG_AGO,
    policy="PLACEMENT_POLICY_SPREAD",
    owner="local",
)  # fmt: skip
ENDPOINT = autoscaler_api.Endpoint(
    name="endpoints/jobs",
    spec={"min_replicas": 0, "max_replicas": 4, "template": {"template": "worker", "gpu_count": 1}},
    status={
        "desired_replicas": 3, "granted_replicas": 2, "ready_replicas": 2,
        "summary": "wants 3, 2 fit on the GPUs there are",
    },
    etag="e1",
    create_time=LONG_AGO,
)  # fmt: skip
WATCHER = autoscaler_api.QueueWatcher(
    name="watchers/jobs",
    spec={"broker": "default", "queue": "jobs"},
    status={"state": "STATE_OK", "ready_count": 12, "age": Duration(seconds=1)},
    etag="w1",
)
REPLICA = autoscaler_api.Replica(
    name="endpoints/jobs/replicas/p1", state="STATE_READY", adapter="adapters/host-1", node="nodes/host-1",
    gpu_uuids=[UUIDS[0]], reservation="reservations/r1", pid=4711, create_time=LONG_AGO,
)  # fmt: skip
DECISION = autoscaler_api.Decision(
    name="endpoints/jobs/decisions/d1",
    create_time=LONG_AGO,
    last_time=LONG_AGO,
    count=3,
    observations=[
        {"signal": "depth", "value": 12.0, "age": Duration(seconds=1), "status": "STATUS_OK"},
        {"signal": "other", "status": "STATUS_MISSING", "detail": "the broker is unreachable"},
    ],
    steps=[
        {
            "stage": "STAGE_RULE", "rule": "up", "before": 2, "after": 3,
            "code": "DECISION_CODE_FIRED", "text": "12 > 10",
        },
        {
            "stage": "STAGE_GPU", "before": 3, "after": 2,
            "code": "DECISION_CODE_NO_CAPACITY", "text": "one GPU missing",
        },
    ],
    before=2,
    wanted=3,
    granted=2,
    limited_by="DECISION_CODE_NO_CAPACITY",
    summary="queue is long, GPUs are short",
)  # fmt: skip
CORDON = allocator_api.Cordon(
    name="nodes/host-1/cordon", target="nodes/host-1", reason="fan", author="local", create_time=LONG_AGO,
    drain_deadline=LONG_AGO, reservations=["reservations/r1"],
)  # fmt: skip
QUOTA = allocator_api.Quota(
    name="quotas/vision", tenant="vision", gpu_milli_limit=8000, gpu_milli_held=1500, waiting_count=2
)
USED = allocator_api.UsageRow(labels={"team": "vision"}, granted_gpu_microseconds=7_200_000_000)
STATISTICS = allocator_api.GpuStatistics(name=NODE.snapshot.gpus[0].name, model="H100", energy_joules=7200)
RECORDING = monitor_api.Recording(name="recordings/nightly", state="STATE_RUNNING", start_time=LONG_AGO)
EVENT = monitor_api.HealthEvent(
    name="healthEvents/7", node=NODE.name, gpu=NODE.snapshot.gpus[0].name, uuid=UUIDS[0], message="hot",
    start_time=LONG_AGO, last_time=LONG_AGO, count=1,
)  # fmt: skip
BOOKING = allocator_api.Booking(
    name="bookings/demo",
    owner="ann",
    state="STATE_BOOKED",
    start_time=LONG_AGO,
    end_time=LONG_AGO,
    gpus=["nodes/host-1/gpus/gpu-a", "nodes/host-1/gpus/gpu-b"],
)
POLICY = allocator_api.UsePolicy(name="policies/idle", spec={"condition": "USE_CONDITION_IDLE"})
ACT = allocator_api.PolicyAct(
    name="policies/idle/acts/1", policy=POLICY.name, subject="reservations/r1", time=LONG_AGO, reason="idle"
)
BUDGET = allocator_api.PowerBudget(
    name="budgets/rack", spec={"watts": 9000, "per": "rack"}, sums=[{"name": "rack=r1", "drawn_watts": 8000}]
)
CHANGE = allocator_api.PowerChange(
    name="changes/1", gpu="nodes/host-1/gpus/gpu-a", watts=300, power_budget=BUDGET.name, time=LONG_AGO
)
AUDITED = audit_api.AuditEvent(
    end_time=LONG_AGO,
    caller="ann",
    role=types_api.Role.ROLE_ADMIN,
    recognised_by="token",
    peer="ipv4:10.0.0.9:53114",
    method="/gpuscale.api.allocator.v1.NodeService/DrainNode",
    request_id="b384a85c504ba507",
    resource="nodes/host-1",
    code="OK",
    duration=Duration(nanos=2_000_000),
)
TARGET = allocator_api.NotificationTarget(name="targets/lab", host="chat.example", etag="e")
LETTER = allocator_api.Notification(name="targets/lab/notifications/1", dead=True, time=LONG_AGO)
OUTLOOK = allocator_api.ExplainPlacementResponse(
    message="no room now",
    reason="NO_ROOM_REASON_NO_CAPACITY",
    constraints=[{"constraint": "OBSTACLE_HELD", "removed_in_order_count": 1, "removed_alone_count": 1}],
    nodes=[
        {
            "name": "nodes/host-1",
            "fitting_count": 1,
            "gpus": [
                {
                    "name": f"nodes/host-1/gpus/{UUIDS[0].lower()}", "obstacle": "OBSTACLE_HELD",
                    "message": "Held by r1.", "reservations": ["reservations/r1"],
                },
                {"name": f"nodes/host-1/gpus/{UUIDS[1].lower()}", "score": {"total": 0.5}},
            ],
        }
    ],
    node_count=1,
    remedies=["wait for r1"],
)  # fmt: skip
ESTIMATE = allocator_api.EstimateRequirementsResponse(
    gpu_count=4, memory_bytes=20_000 << 20, notes=["by the table"], ignored_parameters=["x"]
)
MOVE = allocator_api.RebalanceMove(
    reservation=RESERVATION.name, holder="job", from_node="nodes/n2", gpus=RESERVATION.gpus,
    cost_gpu_seconds=5400, message="preemptible",
)  # fmt: skip
PARTITIONED = allocator_api.RebalancePlan(
    message="it would fit",
    partitions=[{"gpu": "nodes/n2/gpus/gpu-1", "index": 3, "profiles": ["3g.40gb", "1g.10gb"]}],
)
RANKED = allocator_api.RankedNode(
    name="nodes/host-1", idle_gpu_count=1, gpu_count=2, sufficient=True, message="1 of 2 GPUs idle"
)
ADAPTER = autoscaler_api.Adapter(
    name="adapters/host-1", kind="process", node="nodes/host-1", state="STATE_CONNECTED",
    templates=["worker"], replica_count=1, last_seen_time=LONG_AGO,
)  # fmt: skip
BACKTEST = autoscaler_api.Backtest(
    name="backtests/b1",
    spec={"policies": [{"name": "hpa"}]},
    state="STATE_RUNNING",
    request_count=100,
    create_time=LONG_AGO,
)
METRIC = autoscaler_api.ReportedMetric(
    name="endpoints/jobs", value={"metric": "tasks", "value": 7, "age": Duration(seconds=1)}
)
PRESET = autoscaler_api.Preset(
    name="presets/keda", summary="20 messages each.", parameters={"value": "messages (20)"}
)
STEP = {"comparator": "COMPARATOR_GREATER_THAN", "threshold": 10, "step": 1}
RULE = autoscaler_api.EndpointRule(
    name="endpoints/jobs/rules/up", rule={"id": "up", "signal": "depth", "step": STEP}, etag="e1"
)
EVALUATION = autoscaler_api.EvaluateResponse(
    decision={
        "before": 3, "wanted": 4, "limited_by": "DECISION_CODE_CLAMPED_TO_MAX",
        "summary": "from 3 to 4: max_replicas is 4",
    },
    asked=6,
    alternatives=[{"code": "DECISION_CODE_CLAMPED_TO_MAX", "text": "max_replicas were not 4", "wanted": 6}],
    next_change={"wait": Duration(seconds=43), "wanted": 3},
)  # fmt: skip


def fail(context: grpc.ServicerContext, error: errors.GpuscaleError) -> NoReturn:
    """End a call as the real services do."""
    status = to_rpc_status(error)
    context.set_trailing_metadata(status.trailing_metadata)
    context.abort(status.code, status.details)


class World:
    """What the canned services have, and the requests they got; `refuse` makes a method fail, `overrides` answer otherwise."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.waits: list[float | None] = []  # for how long each is waited for
        self.refuse: dict[str, errors.GpuscaleError] = {}
        self.overrides: dict[str, Any] = {}
        self.things: dict[str, Any] = {
            thing.name: thing
            for thing in (
                *(NODE, PROCESS, RESERVATION, ENDPOINT, WATCHER, REPLICA, DECISION, CORDON, RECORDING, EVENT),
                *(ADAPTER, BACKTEST, QUOTA, BOOKING, POLICY, ACT),
                *(BUDGET, CHANGE, TARGET, LETTER, RULE, PRESET),
            )
        }

    def answer(self, method: str, request: Any, context: grpc.ServicerContext) -> None:
        """Note a request, and refuse it if the test wants that."""
        self.requests.append(request)
        self.waits.append(context.time_remaining())
        if method in self.refuse:
            fail(context, self.refuse[method])

    def get(self, name: str, context: grpc.ServicerContext) -> Any:
        if name not in self.things:
            fail(context, errors.NotFoundError(f"{name} not found"))
        return self.things[name]

    def all(self, kind: type[Any]) -> list[Any]:
        return [thing for thing in self.things.values() if isinstance(thing, kind)]


class Service(grpc.GenericRpcHandler):
    """All unary methods of one service, by the names and shapes that the contract's methods share."""

    def __init__(self, world: World, responses: Mapping[str, Any], requests: Mapping[str, Any]) -> None:
        self._world = world
        self._responses = responses
        self._requests = requests

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method.rpartition("/")[2]
        if method not in self._responses:
            return None

        def handle(request: Any, context: grpc.ServicerContext) -> Any:
            self._world.answer(method, request, context)
            response = self._world.overrides.get(method, self._responses[method])(request, context)
            if getattr(request, "filter", ""):
                items = getattr(response, response.DESCRIPTOR.fields[0].name)
                meets = compile_filter(request.filter, type(items[0])) if items else bool
                kept = [one for one in items if meets(one)]
                del items[:]
                items.extend(kept)
            return response

        return grpc.unary_unary_rpc_method_handler(
            handle, self._requests[method].FromString, lambda response: response.SerializeToString()
        )


PLAIN = (
    *("GetNode", "GetReservation", "GetBooking", "GetUsePolicy", "GetPowerBudget", "GetNotificationTarget"),
    *("GetQuota", "GetEndpoint", "GetHealthEvent", "GetRecording", "GetReplica", "GetAdapter"),
    *("GetQueueWatcher", "GetDecision", "GetBacktest", "RenewReservation", "ReleaseReservation"),
    *("ListNodes", "ListProcesses", "ListReservations", "ListCordons", "ListBookings", "ListUsePolicies"),
    *("ListPowerBudgets", "ListPowerChanges", "ListPolicyActs", "ListNotificationTargets", "ListQuotas"),
    *("ListNotifications", "ListEndpoints", "ListHealthEvents", "ListRecordings", "ListReplicas"),
    *("ListRules", "ListQueueWatchers", "ListDecisions", "ListPresets", "ListBacktests", "ListAdapters"),
    *("ForgetNode", "UncordonNode", "DeleteUsePolicy", "DeletePowerBudget", "DeleteNotificationTarget"),
    *("DeleteQuota", "DeleteRule"),
)
"""Answered with the thing of a name, all things of a kind, or nothing, as their answers have room for."""


def service(world: World) -> Service:
    """Every unary method that the CLI calls."""
    a, s, m = allocator_api, autoscaler_api, monitor_api
    known: dict[str, Any] = {name: getattr(one, name) for one in (a, s, m, audit_api) for name in dir(one)}

    def plainly(request: Any, context: grpc.ServicerContext) -> Any:
        response = known[type(request).__name__.replace("Request", "Response")]()
        for field in response.DESCRIPTOR.fields[:1]:
            if field.is_repeated:
                getattr(response, field.name).extend(world.all(known[field.message_type.name]))
            elif field.message_type:
                getattr(response, field.name).CopyFrom(world.get(request.name, context))
        return response

    def changed(thing: Any, *, only_checked: bool = False, **status: int) -> Any:
        copy = type(thing)()
        copy.CopyFrom(thing)
        copy.etag = thing.etag + "+"
        if isinstance(copy, s.Endpoint):
            copy.tenant = world.things[copy.name].tenant  # it stays
        for field, value in status.items():
            setattr(copy.status, field, value)
        if not only_checked:
            world.things[copy.name] = copy
        return copy

    def created(thing: Any, etag: str, *, only_checked: bool) -> Any:
        thing.etag = etag
        if not only_checked:
            world.things[thing.name] = thing
        return thing

    def deleted(name: str, context: grpc.ServicerContext) -> None:
        world.get(name, context)
        del world.things[name]

    responses = dict.fromkeys(PLAIN, plainly) | {
        "Reserve": lambda r, c: a.ReserveResponse(reservation=RESERVATION),
        "CheckAvailability": lambda r, c: a.CheckAvailabilityResponse(
            available=r.ask.gpu_count < 9, message="there", gpus=RESERVATION.gpus
        ),
        "WaitForAvailability": lambda r, c: a.WaitForAvailabilityResponse(available=True),
        "ExplainPlacement": lambda r, c: OUTLOOK,
        "EstimateRequirements": lambda r, c: ESTIMATE,
        "RankNodes": lambda r, c: a.RankNodesResponse(nodes=[RANKED]),
        "ApplyRebalance": lambda r, c: a.ApplyRebalanceResponse(
            plan=a.RebalancePlan(available=True, moves=[MOVE], partitions=PARTITIONED.partitions)
        ),
        "PlanRebalance": lambda r, c: a.PlanRebalanceResponse(
            plans=[PARTITIONED]
            if r.ask.mig_profile
            else [a.RebalancePlan(available=r.ask.gpu_count < 9, message="1 move makes room", moves=[MOVE])],
            notes=["2 reservations: a gang"],
        ),
        "CordonNode": lambda r, c: a.CordonNodeResponse(cordon=CORDON),
        "DrainNode": lambda r, c: a.DrainNodeResponse(cordon=CORDON, reservations=[RESERVATION]),
        "CreateBooking": lambda r, c: a.CreateBookingResponse(booking=BOOKING),
        "CancelBooking": lambda r, c: a.CancelBookingResponse(booking=BOOKING),
        "DryRunUsePolicy": lambda r, c: a.DryRunUsePolicyResponse(
            policy_acts=[ACT],
            act_count=1,
            subject_count=2,
            start_time=LONG_AGO,
            end_time=LONG_AGO,
            step={"seconds": 60},
            known={"seconds": 5400},
            unknown={"seconds": 1800},
            complete_since=LONG_AGO,
        ),
        "ListAuditEvents": lambda r, c: audit_api.ListAuditEventsResponse(
            audit_events=[one for one in [AUDITED] if compile_filter(r.filter, audit_api.AuditEvent)(one)]
        ),
        "UpdateNotificationTarget": lambda r, c: a.UpdateNotificationTargetResponse(
            notification_target=a.NotificationTarget(name=r.notification_target.name, etag="other")
        ),
        "QueryUsage": lambda r, c: a.QueryUsageResponse(rows=[USED], total=USED),
        "GetReservationUsage": lambda r, c: a.GetReservationUsageResponse(name=r.name, gpus=[STATISTICS]),
        "SetQuota": lambda r, c: a.SetQuotaResponse(quota=r.quota),
        "CreateEndpoint": lambda r, c: s.CreateEndpointResponse(
            endpoint=created(r.endpoint, "e1", only_checked=r.validate_only)
        ),
        "UpdateEndpoint": lambda r, c: s.UpdateEndpointResponse(
            endpoint=changed(r.endpoint, only_checked=r.validate_only)
        ),
        "UpdateQueueWatcher": lambda r, c: s.UpdateQueueWatcherResponse(
            queue_watcher=changed(r.queue_watcher, only_checked=r.validate_only)
        ),
        "DeleteEndpoint": lambda r, c: (deleted(r.name, c), s.DeleteEndpointResponse())[1],
        "SetReplicas": lambda r, c: s.SetReplicasResponse(
            endpoint=changed(world.get(r.name, c), desired_replicas=r.replicas)
        ),
        "ReadReplicaLog": lambda r, c: s.ReadReplicaLogResponse(content=f"of {r.name}\n".encode()),
        "CreateQueueWatcher": lambda r, c: s.CreateQueueWatcherResponse(
            queue_watcher=created(r.queue_watcher, "w1", only_checked=r.validate_only)
        ),
        "DeleteQueueWatcher": lambda r, c: (deleted(r.name, c), s.DeleteQueueWatcherResponse())[1],
        "CreateRule": lambda r, c: s.CreateRuleResponse(rule=RULE),
        "GetRule": lambda r, c: s.GetRuleResponse(rule=RULE),
        "UpdateRule": lambda r, c: s.UpdateRuleResponse(rule=RULE),
        "Evaluate": lambda r, c: EVALUATION,
        "RenderPreset": lambda r, c: s.RenderPresetResponse(
            preset="presets/keda", spec=ENDPOINT.spec, notes=["a note"]
        ),
        "Backtest": lambda r, c: s.BacktestResponse(
            reports=[
                s.BacktestReport(
                    name=policy.name,
                    gpu_hours=3.0,
                    violation_percent=2.5,
                    spec=ENDPOINT.spec,
                    timeline=s.BacktestTimeline(seconds=[0, 60], wanted=[1, 2], ready=[1, 1], waiting=[0, 9]),
                )
                for policy in r.policies
            ],
            work_gpu_hours=1.5,
        ),
        "ForgetAdapter": lambda r, c: s.ForgetAdapterResponse(replicas=["endpoints/jobs/replicas/r1"]),
        "ListMetrics": lambda r, c: s.ListMetricsResponse(metrics=[METRIC]),
    }
    requests = {method: known[f"{method}Request"] for method in responses}
    return Service(world, responses, requests)


@contextmanager
def canned_gateway() -> Iterator[tuple[str, World]]:
    """(address, world) of a running canned gateway."""
    world = World()
    with futures.ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool, handlers=[service(world)])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}", world
        finally:
            server.stop(None).wait()


def script(monkeypatch: pytest.MonkeyPatch, module: Any, *steps: Any) -> None:
    """Let each pause of a command be one of these steps; Ctrl-C after the last."""
    left = iter(steps)

    def pause(seconds: float) -> None:
        step = next(left, None)
        if step is None:
            raise KeyboardInterrupt
        step()

    monkeypatch.setattr(module, "pause", pause)
