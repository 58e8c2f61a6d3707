"""Random deeds that leave something to be remembered, done to two allocators alike (`tests.integration.allocator.restarted`)."""

from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any
from uuid import UUID

from google.protobuf.message import Message

from gpuscale.allocator.domain.ledger import RETENTION
from gpuscale.api.allocator import v1 as api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.common.runtime import tasks
from gpuscale.common.wire import seconds, to_datetime, to_duration
from tests.integration.allocator.restarted import (
    FOR_EVER,
    MIB,
    SETTINGS,
    Line,
    all_live,
    different,
    look,
    nobody_waits,
    none_beyond,
    unknown,
)
from tests.support.clock import ManualClock
from tests.support.fake_fleet import NodeState, gpu_message, node_message
from tests.support.waiting import eventually

TENANTS = ("ann", "bob", "eve")
SPOTS = (
    "nodes/n0",
    "nodes/n1",
    "nodes/n2",
    "nodes/n0/gpus/n0-0",
    "nodes/n1/gpus/n1-1",
    "nodes/n2/gpus/gpu-parent",
)
WISHES: Sequence[dict[str, Any]] = (
    {},
    {"policy": api.PlacementPolicy.PLACEMENT_POLICY_BESTFIT},
    {"policy": api.PlacementPolicy.PLACEMENT_POLICY_FIRSTFIT},
    {"gpu_milli": 250},
    {"gpu_milli": 600},
    {"gpu_memory_bytes": 20_000 * MIB},
    {"mig_profile": "1g.10gb"},
    {"models": ["a100"]},
    {"cpu_milli": 4000, "host_memory_bytes": 10_000 * MIB},
    {"apart_from": {"app": "db"}},
    {"gpu_set": api.GpuSet.GPU_SET_MEMORY_BALANCED},
    {"member_count": 2, "gang_strategy": api.GangStrategy.GANG_STRATEGY_STRICT_SPREAD},
    {"member_count": 3, "gpu_milli": 400, "gang_strategy": api.GangStrategy.GANG_STRATEGY_PACK},
    {"member_count": 2, "cpu_milli": 2000, "gang_strategy": api.GangStrategy.GANG_STRATEGY_SPREAD},
)
ODD = 0.1
"""Seconds that keep the moment at which a GPU is lost apart from those at which leases end."""


class Play:
    """Does the same to two lines and compares what they say.

    Args:
        kept: is never restarted.
        killed: is restarted by `restart`.
    """

    def __init__(self, kept: Line, killed: Line, clock: ManualClock, random: Random) -> None:
        self.kept, self.killed = kept, killed
        self.random = random
        self.requests: dict[str, api.ReserveRequest] = {}
        self.story: list[str] = []
        self._clock = clock
        self._nodes = {node.snapshot.node: node for node in site()}
        self._deeds: Sequence[tuple[int, Callable[[], Awaitable[None]]]] = (
            (12, self._reserve),
            (2, self._batch),
            (4, self._renew),
            (4, self._release),
            (3, self._pass_time),
            (5, self._cordon),
            (2, self._uncordon),
            (3, self._quota),
            (2, self._preempt),
            (2, self._lose),
            (2, self._report),
            (1, self._forget_node),
            (1, self._divide),
            (1, self._pass_a_day),
            (3, self._fail),
        )

    async def deed(self) -> None:
        """Something happens."""
        weights = [weight for weight, _ in self._deeds]
        [(_, do)] = self.random.choices(self._deeds, weights)
        await do()

    async def restart(self) -> None:
        """Kill the one, and compare; what it told before as the next page is a page still."""
        tokens = [await self._token(one) for one in (self.kept, self.killed)]
        self.story.append("restart")
        await self.killed.restart()
        await self.compare()
        pages = [
            await one.answer(one.client.allocator.ListReservations(_page(token)))
            for one, token in zip((self.kept, self.killed), tokens, strict=True)
        ]
        assert _without_token(pages[0]) == _without_token(pages[1]), self._told()

    async def reboot(self) -> None:
        """The host of both starts anew: nobody watched the clock, so leases and drains have all of their time again."""
        self.story.append("reboot")
        self._clock.reboot()
        for one in (self.kept, self.killed):
            await one.restart()
        await self.compare()
        found = await self.kept.client.allocator.ListReservations(api.ListReservationsRequest(page_size=1000))
        cordons = (await self.kept.client.nodes.ListCordons(api.ListCordonsRequest())).cordons
        for held in found.reservations:
            assert held.remaining == held.ttl, self._told()
            drains = [to_datetime(one.drain_deadline) for one in cordons if _drains(one, held.name)]
            if "preempted" not in held.end_reason:
                revoked = to_datetime(held.revoke_time) if held.HasField("revoke_time") else None
                assert revoked == min(drains, default=None), f"{self._told()}\n{held.name} {revoked} {drains}"

    async def compare(self) -> None:
        """All that can be seen is seen in both."""
        await self._settled()
        found = different(await look(self.kept, self.requests), await look(self.killed, self.requests))
        assert not found, "\n".join([self._told(), *found[:8]])

    async def _token(self, one: Line) -> str:
        return (await one.client.allocator.ListReservations(_page(""))).next_page_token

    def _told(self) -> str:
        return "what happened:\n  " + "\n  ".join(self.story)

    async def _both(self, story: str, call: Callable[[Line], Awaitable[Message]]) -> None:
        """Ask both, and compare their answers."""
        self.story.append(story)
        answers = [await one.answer(call(one)) for one in (self.kept, self.killed)]
        self.story[-1] += f" -> {answers[0][:160]}"
        assert answers[0] == answers[1], "\n".join([self._told(), *answers])

    async def _settled(self) -> None:
        """Wait until nothing is due in either."""
        for one in (self.kept, self.killed):
            await eventually(partial(self._nothing_due, one), interval=0.005)

    async def _nothing_due(self, one: Line) -> bool:
        wall = self._clock.wall()
        found = await one.client.allocator.ListReservations(api.ListReservationsRequest(page_size=1000))
        return not any(
            seconds(held.remaining) <= 0
            or (held.HasField("revoke_time") and to_datetime(held.revoke_time) <= wall)
            for held in found.reservations
        )

    def _request(self, **more: Any) -> api.ReserveRequest:
        wish = self.random.choice(WISHES)
        return api.ReserveRequest(
            request_id=str(UUID(int=self.random.getrandbits(128))),
            holder=self.random.choice(("job", "web")),
            ask=api.Ask(
                gpu_count=self.random.choice((1, 1, 1, 2)),
                **({"min_memory_bytes": 0, "max_utilization_percent": 100.0} | wish),
            ),
            ttl=to_duration(self.random.choice((30, 60, 90, 600.5))),
            labels={"app": self.random.choice(("db", "x"))},
            tenant=self.random.choice(TENANTS),
            **({"priority": self.random.randint(-2, 2), "preemptible": self.random.random() < 0.5} | more),
        )

    async def _reserve(self) -> None:
        request = self._request()
        await self._both(f"reserve {_words(request)}", lambda one: self._granted(one, request))

    async def _granted(self, one: Line, request: api.ReserveRequest) -> api.Reservation:
        found = await one.client.allocator.Reserve(request)
        one.note(found.reservation, found.lease_token)
        self.requests[request.request_id] = request
        return found.reservation

    async def _batch(self) -> None:
        requests = [self._request() for _ in range(2)]

        async def ask(one: Line) -> api.BatchReserveResponse:
            found = await one.client.allocator.BatchReserve(api.BatchReserveRequest(requests=requests))
            for granted, token, request in zip(found.reservations, found.lease_tokens, requests, strict=True):
                one.note(granted, token)
                self.requests[request.request_id] = request
            return found

        await self._both(f"batch {' and '.join(map(_words, requests))}", ask)

    def _some(self) -> str:
        return self.random.choice(list(self.requests)[-12:])

    async def _renew(self) -> None:
        if not self.requests:
            return
        key, ttl = self._some(), self.random.choice((None, None, 45, 200.25))

        async def renew(one: Line) -> Message:
            held = one.granted[key]
            given = None if ttl is None else to_duration(ttl)
            return await one.client.allocator.RenewReservation(
                api.RenewReservationRequest(name=held.name, fence=held.fence, ttl=given)
            )

        await self._both(f"renew {key} for {ttl}", renew)

    async def _release(self) -> None:
        if not self.requests:
            return
        keys = [self._some() for _ in range(self.random.choice((1, 1, 2)))]

        async def release(one: Line) -> Message:
            given = [
                api.ReleaseReservationRequest(name=one.granted[key].name, fence=one.granted[key].fence)
                for key in keys
            ]
            return await one.client.allocator.BatchRelease(api.BatchReleaseRequest(requests=given))

        await self._both(f"release {keys}", release)

    async def _pass_until_lost(self) -> None:
        """What vanished is lost; first all leases end that end before, since of two that are due at once either may be first."""
        self._clock.advance(SETTINGS["lost_after_seconds"] - 0.01)
        await self._settled()
        self._clock.advance(0.013)
        for one in (self.kept, self.killed):
            await eventually(partial(none_beyond, one, self._nodes), interval=0.005)
        await self._pass_time()

    async def _pass_time(self) -> None:
        passed = self.random.choice((0.5, 3.0, 20.0, 40.0))
        self.story.append(f"{passed} s pass")
        self._clock.advance(passed)
        await self._settled()

    async def _cordon(self) -> None:
        spot, why = self.random.choice(SPOTS), self.random.choice(("", "fan", "power"))
        grace = self.random.choice((None, 15.0, 50.0, 300.0))
        if grace is None:
            asked = api.CordonNodeRequest(name=spot, reason=why)
            await self._both(f"cordon {spot} {why}", lambda one: one.client.nodes.CordonNode(asked))
            return
        drained = api.DrainNodeRequest(name=spot, reason=why, grace=to_duration(grace))
        await self._both(f"drain {spot} {why} {grace}", lambda one: one.client.nodes.DrainNode(drained))

    async def _uncordon(self) -> None:
        request = api.UncordonNodeRequest(name=self.random.choice(SPOTS))
        await self._both(f"uncordon {request.name}", lambda one: one.client.nodes.UncordonNode(request))

    async def _quota(self) -> None:
        tenant = self.random.choice(TENANTS)
        if self.random.random() < 0.3:
            gone = api.DeleteQuotaRequest(tenant=tenant)
            await self._both(f"delete quota {tenant}", lambda one: one.client.quotas.DeleteQuota(gone))
            return
        limit, weight = self.random.choice((None, 0, 2500, 9000)), self.random.choice((None, 0.5, 3.0))
        put = api.SetQuotaRequest(quota=api.Quota(tenant=tenant, gpu_milli_limit=limit, weight=weight))
        await self._both(f"quota {tenant} {limit} {weight}", lambda one: one.client.quotas.SetQuota(put))

    async def _preempt(self) -> None:
        """A request of a high priority comes, may preempt, and gives up as soon as it knows where it stands."""
        request = self._request(may_preempt=True, priority=9, wait=to_duration(3600))
        doomed = api.ReserveRequest(
            request_id=str(UUID(int=self.random.getrandbits(128))), holder="x", ask=api.Ask(gpu_count=4096)
        )

        async def wait(one: Line) -> api.Reservation:
            call = one.client.allocator.ReserveAndWatch(api.ReserveAndWatchRequest(reserve=request))
            try:
                async for news in call:
                    if news.HasField("reservation"):
                        one.note(news.reservation, news.lease_token)
                        self.requests[request.request_id] = request
                        return news.reservation
                    await one.answer(one.client.allocator.Reserve(doomed))  # ends the round that is played
                    break
            finally:
                call.cancel()
            await eventually(partial(nobody_waits, one), interval=0.005)
            await one.heard()
            return api.Reservation()

        await self._both(f"wait and preempt {_words(request)}", wait)

    async def _tell(self, *nodes: monitor_api.Node) -> None:
        for node in nodes:
            self._nodes[node.snapshot.node] = node
        for one in (self.kept, self.killed):
            one.fleet.put(*nodes)
            await one.heard()

    async def _report(self) -> None:
        """A node says something else: its state, or what runs there."""
        node = monitor_api.Node()
        node.CopyFrom(self._nodes[self.random.choice(list(self._nodes))])
        node.state = self.random.choice(
            (NodeState.NODE_STATE_ONLINE, NodeState.NODE_STATE_ONLINE, NodeState.NODE_STATE_STALE)
        )
        for gpu in node.snapshot.gpus:
            gpu.reading.utilization_percent = float(self.random.randint(0, 60))
            gpu.reading.memory_free_bytes = (
                gpu.reading.memory_total_bytes - self.random.choice((0, 0, 3_000)) * MIB
            )
            gpu.reading.memory_used_bytes = gpu.reading.memory_total_bytes - gpu.reading.memory_free_bytes
        self.story.append(f"{node.name} reports anew, state {node.state}")
        await self._tell(node)
        if not self.requests:
            return
        key, used = self._some(), 1_000 * self.random.randint(1, 9) * MIB
        for one in (self.kept, self.killed):
            working = monitor_api.Node()
            working.CopyFrom(node)
            for gpu in working.snapshot.gpus:
                gpu.reading.processes.add(pid=5, memory_used_bytes=used, reservation=one.granted[key].name)
            one.fleet.put(working)
            await one.heard()

    async def _lose(self) -> None:
        """A GPU vanishes for good, or all that vanished come back."""
        name = self.random.choice(list(self._nodes))
        whole = next((one for one in site() if one.snapshot.node == name), None)
        node = monitor_api.Node()
        node.CopyFrom(whole or self._nodes[name])
        if self.random.random() < 0.6:
            del node.snapshot.gpus[0]
        self.story.append(f"{node.name} has {len(node.snapshot.gpus)} GPUs")
        self._clock.advance(ODD)
        await self._tell(node)
        await self._pass_until_lost()

    async def _divide(self) -> None:
        """What was divided into MIG instances becomes whole, or is divided again; who holds some of it holds it still."""
        name = "n2"
        node = monitor_api.Node()
        node.CopyFrom(next(one for one in site() if one.snapshot.node == name))
        if self._nodes[name].snapshot.gpus[0].parent_uuid:
            del node.snapshot.gpus[:]
            node.snapshot.gpus.append(gpu_message("GPU-Parent"))
        self.story.append(f"{name} is divided anew: {[gpu.uuid for gpu in node.snapshot.gpus]}")
        self._clock.advance(ODD)
        await self._tell(node)
        await self._pass_until_lost()

    async def _pass_a_day(self) -> None:
        """What had ended is forgotten, and its request id may be used again."""
        self.story.append("a day passes")
        self._clock.advance(RETENTION + 1)
        await self._settled()
        self._clock.advance(RETENTION + 1)
        for one in (self.kept, self.killed):
            await eventually(partial(all_live, one), interval=0.005)
        self.requests.clear()

    async def _fail(self) -> None:
        """The disk refuses a change, which is as if it had never been asked for."""
        changes = (
            self._reserve,
            self._batch,
            self._renew,
            self._release,
            self._cordon,
            self._uncordon,
            self._quota,
        )
        with failing():
            self.story.append("the disk fails")
            await self.random.choice(changes)()

    async def _forget_node(self) -> None:
        """A node is taken away for good, and one comes that was never seen, or comes back."""
        if "n1" in self._nodes:
            self.story.append("n1 is forgotten")
            del self._nodes["n1"]
            self._clock.advance(ODD)
            for one in (self.kept, self.killed):
                one.fleet.remove("n1")
                await one.heard()
            await self._pass_until_lost()
            for one in (self.kept, self.killed):
                await eventually(partial(unknown, one, "nodes/n1"), interval=0.005)
                await one.heard()
        else:
            self.story.append("n1 comes back")
            await self._tell(next(one for one in site() if one.snapshot.node == "n1"))


def _drains(cordon: api.Cordon, name: str) -> bool:
    return cordon.HasField("drain_deadline") and name in cordon.reservations


def _words(request: api.ReserveRequest) -> str:
    return " ".join(str(request).split())


def _page(token: str) -> api.ListReservationsRequest:
    return api.ListReservationsRequest(page_size=2, page_token=token, show_ended=True)


def _without_token(page: str) -> str:
    return page.partition('"next_page_token"')[0]


@contextmanager
def failing() -> Generator[None]:
    """No write comes to disk meanwhile."""
    before, tasks._points = tasks._points, tasks.parse_failpoints("allocator.store.before_commit=error")
    try:
        yield
    finally:
        tasks._points = before


def site() -> list[monitor_api.Node]:
    """Whole GPUs of two models, MIG instances, and GPUs with processes of no reservation."""
    whole = [_linked(gpu_message(f"n0-{index}", index), 4, "n0") for index in range(4)]
    older = [
        gpu_message(f"n1-{index}", index, total=40_000, free=40_000, utilization=7.0) for index in range(3)
    ]
    parts = [gpu_message(f"MIG-{index}", index, total=10_000, free=10_000) for index in range(3)]
    used = [gpu_message(f"n3-{index}", index, free=80_000 - 9_000 * index) for index in range(2)]
    for gpu in older:
        gpu.model = "Test A100"
    for gpu in whole:
        gpu.model = "Test H200"
    for part in parts:
        part.parent_uuid, part.mig_profile = "GPU-Parent", "1g.10gb"
    used[1].reading.processes.add(pid=77, memory_used_bytes=9_000 * MIB, command="strange")
    found = [
        node_message(f"n{number}", *gpus, period=FOR_EVER)
        for number, gpus in enumerate((whole, older, parts, used))
    ]
    for node, zone in zip(found, "abab", strict=True):
        node.snapshot.host.labels["zone"] = zone
        node.snapshot.host_reading.cpu_count = 32
        node.snapshot.host_reading.memory_total_bytes = 256_000 * MIB
    return found


def _linked(gpu: types_api.Gpu, count: int, node: str) -> types_api.Gpu:
    for index in range(count):
        if index != gpu.index:
            gpu.nvlinks.add(uuid=f"{node}-{index}", link_count=1 + (gpu.index + index) % 2)
    return gpu
