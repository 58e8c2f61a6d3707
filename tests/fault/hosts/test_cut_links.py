"""Links between hosts are cut and healed, and the allocator is killed meanwhile: nothing is granted twice, nothing stops."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
import pytest

from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.errors import FailedPreconditionError, NotFoundError, UnavailableError
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.wire import to_duration
from tests.fault.hosts.lan import why_unavailable
from tests.fault.hosts.site import (
    AGENT,
    ALLOCATOR,
    LEFT,
    RIGHT,
    SERVICES,
    UTILIZATION,
    Calls,
    Hosts,
    calling,
    three_hosts,
)
from tests.support.allocator import Client, Reservation, allocator_api
from tests.support.autoscaler_app import LESS_OR_EQUAL, endpoint, step
from tests.support.fixtures import need
from tests.support.nvml_double import why_unavailable as why_no_double
from tests.support.nvml_double.model import DoubleProcess
from tests.support.waiting import eventually

TTL = 12.0
"""Seconds of the lease that cuts are measured by; it is longer while nothing is cut."""
READY, UNKNOWN = autoscaler_api.Replica.STATE_READY, autoscaler_api.Replica.STATE_UNKNOWN
BROKEN = (AssertionError, grpc.aio.AioRpcError, UnavailableError)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Hosts]:
    need(why_unavailable() or why_no_double())
    with three_hosts(tmp_path) as hosts:
        yield hosts
        print(hosts.logs())


class Holder:
    """Who holds a GPU of the left host, and calls from there."""

    def __init__(self, channel: grpc.aio.Channel, agent: grpc.aio.Channel) -> None:
        self.client = Client(allocator_api.AllocatorServiceStub(channel), timeout=60.0)
        self._work: Any = monitor_api.WorkServiceStub(agent)

    async def admit(self, one: Reservation, pid: int | None = None) -> None:
        """Ask the agent whether the work of a reservation may start."""
        uuids = [gpu.uuid for gpu in one.gpus]
        request = monitor_api.AdmitWorkRequest(
            gpu_uuids=uuids, fence=one.fence, reservation=one.name, pid=pid
        )
        with rpc_errors():
            await self._work.AdmitWork(request, timeout=60)


async def contend(client: Client, request_id: str) -> Reservation:
    """Wait for a GPU of the left host; an allocator that dies meanwhile, or says that the host is away, is asked again."""
    while True:
        try:
            return await client.reserve(
                request_id=request_id,
                ttl=3600.0,
                nodes=[f"nodes/{LEFT}"],
                wait=to_duration(600),
                max_utilization_percent=100,
            )
        except (UnavailableError, FailedPreconditionError) as error:
            if error.reason not in ("UNAVAILABLE", "SHUTTING_DOWN", "NODE_NOT_ONLINE"):
                raise
            await asyncio.sleep(0.1)


async def scale(calls: Calls) -> dict[str, autoscaler_api.Replica]:
    """An endpoint with a replica on each host, that would be scaled in if GPUs were less busy than they are."""
    wanted = endpoint(
        step("down", LESS_OR_EQUAL, UTILIZATION * 0.75, -1), high=2, gpus=1, max_utilization_percent=100
    )
    busy = autoscaler_api.GpuSignal(metric="utilization_percent")
    wanted.spec.signals[0].CopyFrom(autoscaler_api.Signal(id="depth", gpu=busy, max_age=to_duration(15)))
    wanted.spec.template.lease_ttl.CopyFrom(to_duration(60))
    request = autoscaler_api.CreateEndpointRequest(endpoint=wanted, request_id=str(uuid4()))
    await calls.endpoints.CreateEndpoint(request, timeout=60)
    await calls.endpoints.SetReplicas(
        autoscaler_api.SetReplicasRequest(name="endpoints/e", replicas=2), timeout=60
    )

    async def ready() -> dict[str, autoscaler_api.Replica] | None:
        found = await calls.replicas()
        ready = {node: one for node, one in found.items() if one.state == READY}
        return ready if set(ready) == {LEFT, RIGHT} else None

    found = await eventually(ready, timeout=120.0)
    assert found is not None
    return found


async def states(calls: Calls) -> dict[str, int]:
    return {node: one.state for node, one in (await calls.replicas()).items()}


def facts(replicas: dict[str, autoscaler_api.Replica]) -> set[tuple[str, str, int, str]]:
    """Which they are, where, as which process, with which reservation."""
    return {(one.name, node, one.pid, one.reservation) for node, one in replicas.items()}


async def cut_for_half_a_ttl(site: Hosts, calls: Calls, holder: Holder, lease: Reservation) -> None:
    """The lease goes on, and so does its holder."""
    await holder.client.renew(lease, ttl=TTL)
    site.lan.cut(LEFT)

    async def half_over() -> bool:
        found = await calls.allocator.get(lease.name)
        assert found.state == Reservation.STATE_ACTIVE
        return found.expire_time.ToNanoseconds() / 1e9 - time.time() < TTL / 2

    await eventually(half_over, retry_on=())
    site.lan.heal(LEFT)
    assert (await holder.client.renew(lease, ttl=3600.0)).fence == lease.fence


async def cut_until_it_is_over(
    site: Hosts, calls: Calls, holder: Holder, lease: Reservation, contender: "asyncio.Task[Reservation]"
) -> None:
    """The lease ends, and its GPU is nobody's before the host is back, also for an allocator that was killed."""
    before = facts(await calls.replicas())
    await holder.client.renew(lease, ttl=TTL)
    site.lan.cut(LEFT)
    site.kill_allocator()
    site.start_allocator()

    async def expired() -> bool:
        return (await calls.allocator.get(lease.name)).state == Reservation.STATE_EXPIRED

    async def unknown() -> bool:
        return await states(calls) == {LEFT: UNKNOWN, RIGHT: READY}

    await eventually(expired, timeout=120.0, retry_on=BROKEN)
    await eventually(unknown, timeout=120.0, retry_on=BROKEN)
    other = await calls.allocator.reserve(nodes=[f"nodes/{RIGHT}"], max_utilization_percent=100)
    await calls.allocator.release(other)  # what is free is given out meanwhile
    assert (await calls.nodes())[LEFT] != "ONLINE"
    assert not contender.done()
    assert await states(calls) == {LEFT: UNKNOWN, RIGHT: READY}
    assert facts(await calls.replicas()) == before
    site.lan.heal(LEFT)


async def test_a_host_that_is_cut_off_keeps_what_it_has_and_nobody_gets_it_twice(site: Hosts) -> None:
    here = site.lan.address(SERVICES)
    targets = (f"{here}:{ALLOCATOR}", f"{site.lan.address(LEFT)}:{AGENT}")
    far = [site.channel(one) for one in site.lan.reach(LEFT, *targets, log=site.folder / "reach.log")]
    async with calling(site) as calls, far[0], far[1]:
        holder = Holder(far[0], far[1])
        everywhere: dict[str, Any] = {"max_utilization_percent": 100}
        # The allocator follows the fleet by a stream of its own, and may have begun before it.
        early = (FailedPreconditionError, NotFoundError, UnavailableError)
        blocker = await eventually(
            lambda: calls.allocator.reserve(nodes=[f"nodes/{RIGHT}"], **everywhere), retry_on=early
        )
        lease = await eventually(
            lambda: holder.client.reserve(ttl=3600.0, nodes=[f"nodes/{LEFT}"], **everywhere), retry_on=early
        )
        worker = site.lan.start(LEFT, "/bin/sleep", "1000", log=site.folder / "worker.log")
        await holder.admit(lease, worker.pid)
        replicas = await scale(calls)
        # A GPU is free on the right host now, for whoever takes a replica that is not heard of for one that ended.
        await calls.allocator.release(blocker)
        contender = asyncio.create_task(contend(calls.allocator, str(uuid4())))

        await cut_for_half_a_ttl(site, calls, holder, lease)
        assert not contender.done()
        await cut_until_it_is_over(site, calls, holder, lease, contender)

        granted = await asyncio.wait_for(contender, 120)
        assert [gpu.uuid for gpu in granted.gpus] == [gpu.uuid for gpu in lease.gpus]
        assert granted.fence > lease.fence
        await holder.admit(granted)
        with pytest.raises(FailedPreconditionError) as refused:
            await holder.admit(lease)
        assert refused.value.reason == "RESERVATION_ENDED"
        await the_old_worker_is_reported(site, calls, granted, worker.pid)
        await eventually(lambda: _all_ready(calls), timeout=120.0, retry_on=BROKEN)
        assert facts(await calls.replicas()) == facts(replicas)
        held = [gpu.uuid for one in await calls.allocator.live() for gpu in one.gpus]
        assert sorted(held) == sorted({*held})
        assert len(held) == 3
        await the_rule_works(site, calls)


async def the_old_worker_is_reported(site: Hosts, calls: Calls, granted: Reservation, pid: int) -> None:
    """It slept through the end of its lease and uses a GPU that is another's: whoever looks at that one is told."""
    double = site.doubles[LEFT]
    [gpu] = [one for one in double.gpus if one.uuid.lower() == granted.gpus[0].uuid.lower()]
    gpu.processes.append(DoubleProcess(pid))
    double.write()

    async def told() -> bool:
        found = await calls.allocator.get(granted.name)
        return [list(one.outsider_pids) for one in found.usage.gpus] == [[pid]]

    await eventually(told, timeout=120.0, retry_on=BROKEN)


async def the_rule_works(site: Hosts, calls: Calls) -> None:
    """It was not for want of a rule that nothing was scaled in."""
    for double in site.doubles.values():
        for gpu in double.gpus:
            gpu.utilization_percent = 0
        double.write()

    async def fewer() -> bool:
        found = await calls.endpoints.GetEndpoint(
            autoscaler_api.GetEndpointRequest(name="endpoints/e"), timeout=60
        )
        return int(found.endpoint.status.desired_replicas) < 2

    await eventually(fewer, timeout=120.0, retry_on=BROKEN)


async def _all_ready(calls: Calls) -> bool:
    return await states(calls) == {LEFT: READY, RIGHT: READY}
