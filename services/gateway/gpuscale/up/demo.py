"""`gpuscalectl up --demo`: real services for a simulated site, with its people, its endpoints, and a day of incidents.

The seed determines loads, names and times; the demo's day can run faster than real time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count
from random import Random
from uuid import UUID

import grpc
from google.protobuf.json_format import ParseDict

from gpuscale.allocator.app import until_known
from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.client.calls import AsyncCalls
from gpuscale.client.client import AsyncClient
from gpuscale.common.errors import AlreadyExistsError, GpuscaleError, NotFoundError
from gpuscale.common.rpc.channel import RPC_TIMEOUT
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import TaskScope, wait_at_most
from gpuscale.common.wire import to_duration
from gpuscale.up.demo_hosts import Build, DemoProgram, DemoSite, Traffic, Workers

LEASE = 30.0
"""Seconds of a lease."""
PATIENCE = 6 * 3600.0
"""Seconds to wait in the queue."""


@dataclass(frozen=True, slots=True)
class Habit:
    """What a person does repeatedly; times are (least, most) in hours of the demo's day."""

    user: str
    tenant: str
    program: str
    gpus: int
    lasts: tuple[float, float]
    rests: tuple[float, float]
    load: float  # utilization of its GPUs in percent; 0 for a forgotten reservation
    memory: float  # fraction of each GPU's memory
    nodes: Sequence[str] = ()  # node; empty for any
    members: int | None = None
    priority: int = 0
    labels: tuple[tuple[str, str], ...] = ()


async def live(habit: Habit, site: DemoSite, client: AsyncClient, seed: str) -> None:
    """For ever: reserve, use, release, rest. A refused request is retried after the rest."""
    random = Random(f"{seed}/{habit.user}/{habit.program}")

    def load() -> float:
        return habit.load and habit.load + random.uniform(-6.0, 6.0)

    await site.sleep(random.uniform(0.0, 0.05))
    while True:
        lasts = random.uniform(*habit.lasts)
        with suppress(GpuscaleError):
            async with client.reserve(
                habit.gpus,
                habit.user,
                nodes=habit.nodes or list(site.hosts),
                member_count=habit.members,
                gang_strategy="pack" if habit.members else "",
                ttl=LEASE,
                wait=PATIENCE,
                tenant=habit.tenant,
                priority=habit.priority,
                labels=dict(habit.labels),
                owner=habit.user,
            ) as lease:
                program = DemoProgram(habit.user, habit.program, load, habit.memory, lease.name)
                site.begin(lease.gpu_uuids, program)
                try:
                    await wait_at_most(lease.lost, lasts * 3600 / site.speed)
                finally:
                    site.end(program)
        await site.sleep(random.uniform(*habit.rests))


SERVING = "serving"
H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"
BUILDS = (
    Build("atlas", H100, 8, 80, 700.0, 112, 1024, {"rack": "r1", "pool": "training"}),
    Build("boreas", H100, 8, 80, 700.0, 112, 1024, {"rack": "r1", "pool": "training"}),
    Build("ceres", A100, 8, 80, 400.0, 96, 512, {"rack": "r2", "pool": SERVING}),
    Build("dione", "NVIDIA L40S", 4, 48, 350.0, 64, 256, {"rack": "r3", "pool": SERVING}),
    Build("eris", "NVIDIA RTX A6000", 4, 48, 300.0, 48, 256, {"rack": "r3", "pool": SERVING}),
)
HABITS = (
    Habit("ann", "vision", "train.py", 4, (1.5, 4.0), (0.2, 0.6), 92.0, 0.8, ("atlas", "boreas")),
    Habit("ben", "vision", "jupyter-lab", 1, (2.0, 5.0), (0.3, 1.0), 0.0, 0.3, labels=(("job", "notebook"),)),
    Habit("cho", "speech", "sweep.py", 1, (0.3, 0.8), (0.05, 0.2), 78.0, 0.5),
    Habit("cho", "speech", "sweep.py --seed 2", 1, (0.3, 0.8), (0.05, 0.2), 74.0, 0.5),
    Habit("dee", "speech", "finetune.py", 2, (0.8, 2.0), (0.3, 0.9), 88.0, 0.7, ("ceres", "atlas")),
    Habit("eli", "lm", "pretrain.py", 8, (1.0, 2.5), (0.5, 2.0), 96.0, 0.9, ("atlas", "boreas"), priority=10),
    Habit("hal", "lm", "rlhf.py", 4, (1.0, 3.0), (0.3, 1.0), 84.0, 0.75, ("boreas", "ceres"), members=2),
    Habit("fay", "lm", "eval.py", 2, (0.2, 0.6), (0.2, 0.6), 65.0, 0.4, priority=-10),
)
ENDPOINTS: Mapping[str, tuple[float, int]] = {"chat": (8.0, 6), "embed": (16.0, 4)}
"""Concurrent requests per replica, and most replicas, by endpoint."""
_log = get_logger(__name__)
REPORT_SECONDS = 1.0
AGAIN = 1.0
"""Seconds until a lost connection is reopened."""


@asynccontextmanager
async def open_demo(services: grpc.aio.Channel, *, speed: float, seed: int) -> AsyncGenerator[None]:
    """Run the demo until the end of the block, as an admin, `speed` times faster than real time.

    `seed` determines people, loads and incidents.
    """
    site = DemoSite(BUILDS, speed)
    traffic = Traffic({name: capacity for name, (capacity, _) in ENDPOINTS.items()})
    client = AsyncClient(AsyncCalls(services, RPC_TIMEOUT, lambda error, _: error), "")
    async with TaskScope() as scope:
        for host in site.hosts.values():
            scope.spawn(f"demo host {host.build.node}", _again(host.report, services))
        await until_known(services, {f"nodes/{build.node}": build.gpus for build in BUILDS})
        for build in BUILDS:
            if build.labels["pool"] == SERVING:
                workers = Workers(build.node, site, traffic)
                scope.spawn(f"demo workers {build.node}", _again(workers.run, services))
        await _set_up(client, speed, seed)
        for number, habit in enumerate(HABITS):
            scope.spawn(f"demo {habit.user} {number}", live(habit, site, client, str(seed)))
        for name in ENDPOINTS:
            scope.spawn(f"demo {name}", _serve(name, site, traffic, client, seed))
        scope.spawn("demo outsider", _intrude(site, seed))
        scope.spawn("demo incidents", _misfortunes(site, client))
        yield


async def _again(connect: Callable[[grpc.aio.Channel], Awaitable[None]], channel: grpc.aio.Channel) -> None:
    while True:
        with suppress(GpuscaleError), rpc_errors():
            await connect(channel)
        await asyncio.sleep(AGAIN)


async def _set_up(client: AsyncClient, speed: float, seed: int) -> None:
    """Create quotas, a use policy and endpoints; those of an earlier demo in the same directory stay."""
    for tenant, gpus in {"vision": 12, "speech": 8, "lm": 20, "product": 14}.items():
        quota = allocator_api.Quota(name=f"quotas/{tenant}", gpu_milli_limit=1000 * gpus, weight=1.0)
        await _attempt(client.quotas.SetQuota(allocator_api.SetQuotaRequest(quota=quota)))
    idle = max(60.0, 3600 / speed)
    policy = {
        "name": "policies/idle",
        "spec": {
            "condition": "USE_CONDITION_IDLE",
            "stages": [
                {"after": f"{idle:g}s", "actions": ["POLICY_ACTION_NOTE"]},
                {"after": f"{2 * idle:g}s", "actions": ["POLICY_ACTION_REVOKE"], "grace": "60s"},
            ],
            "active": True,
            "description": "unused for an hour of the demo's day",
        },
    }
    request = {"usePolicy": policy, "requestId": _uuid(seed, "policy")}
    await _attempt(
        client.policies.CreateUsePolicy(ParseDict(request, allocator_api.CreateUsePolicyRequest()))
    )
    for name, (capacity, most) in ENDPOINTS.items():
        endpoint = {
            "name": f"endpoints/{name}",
            "tenant": "product",
            "spec": {
                "minReplicas": 1,
                "maxReplicas": most,
                "tick": "1s",
                "signals": [{"id": "in-flight", "pushed": {"metric": "in_flight"}, "maxAge": "10s"}],
                "rules": [{"id": "load", "signal": "in-flight", "target": {"value": capacity * 0.8}}],
                "template": {"template": name, "ask": {"gpuCount": 1, "nodeLabels": {"pool": SERVING}}},
            },
        }
        request = {"endpoint": endpoint, "requestId": _uuid(seed, name)}
        await _attempt(
            client.endpoints.CreateEndpoint(ParseDict(request, autoscaler_api.CreateEndpointRequest()))
        )


def _uuid(seed: int, what: str) -> str:
    return str(UUID(int=Random(f"{seed}/{what}").getrandbits(128), version=4))


async def _attempt(call: Awaitable[object]) -> None:
    """Make a call; ignore what already exists or is gone, and log other errors."""
    try:
        with suppress(AlreadyExistsError, NotFoundError):
            await call
    except GpuscaleError as error:
        _log.warning("a call of the demo failed", problem=error.message)


async def _serve(name: str, site: DemoSite, traffic: Traffic, client: AsyncClient, seed: int) -> None:
    """Report each second how many requests there are: by the hour of the day, with bursts."""
    random = Random(f"{seed}/{name}")
    capacity, most = ENDPOINTS[name]
    burst_until = 0.0
    while True:
        hour = site.hours()
        day = (1 - math.cos((hour % 24 - 3) / 24 * 2 * math.pi)) / 2  # minimum at 3:00, maximum at 15:00
        if random.random() < 0.004 * site.speed / 10:
            burst_until = hour + random.uniform(0.2, 0.5)
        burst = 0.5 if hour < burst_until else 0.0
        mean = capacity * most * (0.1 + 0.5 * day + burst)
        traffic.requests[name] = max(0.0, random.gauss(mean, mean * 0.06))
        value = autoscaler_api.MetricValue(metric="in_flight", value=round(traffic.requests[name]))
        request = autoscaler_api.ReportMetricsRequest(name=f"endpoints/{name}", values=[value])
        await _attempt(client.metrics.ReportMetrics(request))
        await asyncio.sleep(REPORT_SECONDS)


async def _intrude(site: DemoSite, seed: int) -> None:
    """Now and then, use a GPU without a reservation."""
    random = Random(f"{seed}/outsider")
    while True:
        await site.sleep(random.uniform(0.5, 1.5))
        program = DemoProgram("guy", "quick_test.py", lambda: 40.0, 0.2)
        site.begin([random.choice(list(site.hosts["eris"].programs))], program)
        await site.sleep(random.uniform(0.2, 0.5))
        site.end(program)


async def _misfortunes(site: DemoSite, client: AsyncClient) -> None:
    """Each day: a host hangs, a GPU fails, a host is drained for maintenance."""
    for day in count():
        await site.sleep(max(0.0, day * 24 + 9.3 - site.hours()))
        ceres = site.hosts["ceres"]
        ceres.fail(list(ceres.programs)[day % ceres.build.gpus], 48)  # a double-bit ECC error
        await site.sleep(1.0)
        site.hosts["eris"].hangs = True
        await site.sleep(0.4)
        site.hosts["eris"].hangs = False
        await site.sleep(1.0)
        drain = allocator_api.DrainNodeRequest(
            name="nodes/dione", reason="a new power supply", grace=to_duration(60.0)
        )
        await _attempt(client.nodes.DrainNode(drain))
        await site.sleep(1.0)
        await _attempt(client.nodes.UncordonNode(allocator_api.UncordonNodeRequest(name="nodes/dione")))
