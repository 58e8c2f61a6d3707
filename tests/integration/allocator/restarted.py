"""Two allocators that are told the same: one that is never restarted, and one that is killed now and then.

The killed one goes on from a copy of its files as they were at that moment, which is what `kill -9` leaves behind.
Both are asked all that can be seen over gRPC; what differs is what a restart forgot. Ids, fences and tokens are put into words
that both share, since an allocator draws a new ending for its ids when it starts, and a key for its tokens.
"""

import json
import re
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from gpuscale.api.allocator import v1 as api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.client import AsyncClient, UnavailableError, connect_async
from gpuscale.common.errors import GpuscaleError
from gpuscale.common.secrets import SecretUrl
from tests.support.allocator import allocator
from tests.support.clock import ManualClock
from tests.support.fake_fleet import FakeFleet, gpu_message, node_message, serving
from tests.support.waiting import eventually

ACTIVE = api.Reservation.STATE_ACTIVE
MIB = 1024 * 1024
BEACON = "zz-beacon"
"""A node that nobody can use; what it says last tells whether the allocator has heard all that the fleet said."""
FIRSTFIT = api.PlacementPolicy.PLACEMENT_POLICY_FIRSTFIT
PAGE = 3
"""A small page, so that a list has several."""
_NODES = ("nodes/n0", "nodes/n1", "nodes/n2", "nodes/n3")
FOR_EVER = 1e8
SETTINGS: dict[str, Any] = {"preemption_min_runtime_seconds": 20, "lost_after_seconds": 10}

_ID = re.compile(r"\br[a-z2-7]{12}\b")
_TOKEN = re.compile(r"(?<=\")[\w-]{43}(?=\")")
_FENCE = re.compile(r"(fence\"?:? \"?)(\d+)")
_RANK = re.compile(r"(\"rank\", \"value\": |\"total\": -)\d+\.0(?!\d)")
"""The number itself is not kept: that of a forgotten node may be given again. Which node comes first is told by the answers."""


class Line:
    """One allocator over all its lives, with a fleet of its own; a client of the life that runs now."""

    def __init__(
        self,
        folder: Path,
        clock: ManualClock,
        fleet: FakeFleet,
        fleet_address: str,
        database: SecretUrl | None,
    ) -> None:
        self.fleet = fleet
        self.client: AsyncClient
        self.granted: dict[str, api.Reservation] = {}
        self._clock = clock
        self._folder = folder
        self._fleet_address = fleet_address
        self._database = database
        self._life = 0
        self._stack = AsyncExitStack()
        self._words: dict[str, str] = {}
        self._beats = 0

    async def start(self) -> None:
        """Begin a life on the files of its number."""
        settings = SETTINGS | ({} if self._database is None else {"database": self._database})
        folder = self._folder / str(self._life)
        address = await self._stack.enter_async_context(
            allocator(folder, self._fleet_address, clock=self._clock, **settings)
        )
        self.client = await self._stack.enter_async_context(connect_async(address))
        await eventually(self.ranked, retry_on=(UnavailableError,))
        await self.heard()

    async def restart(self) -> None:
        """Go on from what a kill would leave now."""
        before, self._stack = self._stack, AsyncExitStack()
        if self._database is None:
            last, self._life = self._folder / str(self._life), self._life + 1
            shutil.copytree(last, self._folder / str(self._life))
            await self.start()
            await before.aclose()
        else:
            await before.aclose()
            await self.start()

    async def close(self) -> None:
        """End the life that runs."""
        await self._stack.aclose()

    async def ranked(self) -> api.RankNodesResponse:
        """All nodes, as they are known."""
        return await self.client.capacity.RankNodes(api.RankNodesRequest())

    async def heard(self) -> None:
        """Wait until the allocator has heard all that its fleet said, and has that on disk."""
        self._beats += 1
        told = self._beats / 1024
        self.fleet.put(beacon(told))

        async def known() -> bool:
            found = {node.name: node for node in (await self.ranked()).nodes}
            return found[f"nodes/{BEACON}"].mean_utilization_percent == told

        await eventually(known, interval=0.003)
        quota = api.Quota(tenant=BEACON, weight=2)  # what was written before it is on disk when it is
        await self.client.quotas.SetQuota(api.SetQuotaRequest(quota=quota))
        await self.client.quotas.DeleteQuota(api.DeleteQuotaRequest(tenant=BEACON))

    def note(self, granted: api.Reservation, lease_token: str) -> None:
        """Learn what a reservation and its token are here, and check that its fence is higher than all before."""
        known = self.granted.get(granted.request_id)
        if known is not None and known.name == granted.name:
            return
        highest = max((one.fence for one in self.granted.values()), default=0)
        assert granted.fence > highest, f"fence {granted.fence} was given after {highest}"
        assert granted.name not in {one.name for one in self.granted.values()}
        self.granted[granted.request_id] = granted
        self._words[granted.name.partition("/")[2]] = self._words[str(granted.fence)] = granted.request_id
        self._words[lease_token] = granted.request_id

    def told(self, message: Message | str) -> str:
        """A message in words that both lines share."""
        text = message
        if isinstance(message, Message):
            text = json.dumps(MessageToDict(message, preserving_proto_field_name=True), sort_keys=True)
        assert isinstance(text, str)
        text = _ID.sub(lambda found: f"<{self._words.get(found[0], found[0])}>", text)
        text = _TOKEN.sub(lambda found: f"<{self._words.get(found[0], found[0])}>", text)
        text = _RANK.sub(r"\1<rank>", text)
        return _FENCE.sub(lambda found: f"{found[1]}<{self._words.get(found[2], found[2])}>", text)

    async def answer(self, call: Awaitable[Message]) -> str:
        """What a call comes to, its error too, in words that both lines share."""
        try:
            return self.told(await call)
        except GpuscaleError as error:
            said = f"{type(error).__name__} {error.reason} {error.message} {sorted(error.metadata.items())}"
            return self.told(said)


def beacon(utilization: float) -> monitor_api.Node:
    """The node whose reading tells how much was heard; its GPU is of a kind that nobody asks for."""
    gpu = gpu_message("beacon", utilization=utilization)
    gpu.mig_profile = "beacon"
    return node_message(BEACON, gpu, period=FOR_EVER)


@asynccontextmanager
async def line(
    folder: Path, clock: ManualClock, fleet: FakeFleet, database: SecretUrl | None = None
) -> AsyncGenerator[Line]:
    """An allocator with its fleet, running."""
    fleet.put(beacon(0))
    async with serving(fleet) as address:
        one = Line(folder, clock, fleet, address, database)
        try:
            await one.start()
            yield one
        finally:
            await one.close()


def asks() -> Iterator[api.Ask]:
    """What is asked of both: of each sort something small, and something that needs what is held."""
    kinds: Sequence[dict[str, Any]] = (
        {},
        {"gpu_milli": 300},
        {"gpu_memory_bytes": 9000 * MIB},
        {"mig_profile": "1g.10gb"},
        {"models": ["h200"], "gpu_set": api.GpuSet.GPU_SET_NVLINK},
        {"cpu_milli": 9000, "host_memory_bytes": 60_000 * MIB},
        {"apart_from": {"app": "db"}},
        {"node_labels": {"zone": "a"}, "policy": api.PlacementPolicy.PLACEMENT_POLICY_BESTFIT},
    )
    for kind in kinds:
        for count in (1, 4):
            yield api.Ask(gpu_count=count, min_memory_bytes=0, max_utilization_percent=100, **kind)
    for strategy in api.GangStrategy.values():
        yield api.Ask(gpu_count=1, member_count=3, gang_strategy=strategy, policy=FIRSTFIT)
    for node in _NODES:
        yield api.Ask(gpu_count=1, min_memory_bytes=0, nodes=[node])


async def look(line: Line, requests: Mapping[str, api.ReserveRequest]) -> dict[str, str]:
    """What can be seen, by what was asked; `requests` are those that were granted and are not forgotten."""
    seen = {f"{name} {number}": told async for name, number, told in _lists(line)}
    seen |= {name: told async for name, told in _places(line)}
    for one in requests.values():
        name = line.granted[one.request_id].name
        get = api.GetReservationRequest(name=name)
        seen[f"get {one.request_id}"] = await line.answer(line.client.allocator.GetReservation(get))
        seen[f"replay {one.request_id}"] = await line.answer(line.client.allocator.Reserve(one))
        other = api.ReserveRequest()
        other.CopyFrom(one)
        other.ttl.seconds += 1
        seen[f"reuse {one.request_id}"] = await line.answer(line.client.allocator.Reserve(other))
    return seen


async def _lists(line: Line) -> AsyncIterator[tuple[str, int, str]]:
    for ended in (False, True):
        async for number, page in _pages(line, ended=ended):
            yield f"list ended={ended}", number, page
    quotas = await line.client.quotas.ListQuotas(api.ListQuotasRequest())
    for number, quota in enumerate(quotas.quotas):
        yield "quota", number, line.told(quota)
    cordons = await line.client.nodes.ListCordons(api.ListCordonsRequest())
    for number, cordon in enumerate(cordons.cordons):
        yield "cordon", number, line.told(cordon)


async def _pages(line: Line, *, ended: bool) -> AsyncIterator[tuple[int, str]]:
    token, number = "", 0
    while token or not number:
        request = api.ListReservationsRequest(page_size=PAGE, page_token=token, show_ended=ended)
        page = await line.client.allocator.ListReservations(request)
        token, number = page.next_page_token, number + 1
        yield number, "\n".join(line.told(one) for one in page.reservations)


async def _places(line: Line) -> AsyncIterator[tuple[str, str]]:
    capacity = line.client.capacity
    for wanted in (0, 1, 3):
        found = await capacity.RankNodes(api.RankNodesRequest(gpu_count=wanted))
        rest = [one for one in found.nodes if BEACON not in one.name]
        yield f"rank {wanted}", line.told(api.RankNodesResponse(nodes=rest, fallback=found.fallback))
    for number, ask in enumerate(asks()):
        yield (
            f"explain {number} {line.told(ask)}",
            await line.answer(capacity.ExplainPlacement(api.ExplainPlacementRequest(ask=ask))),
        )


def different(kept: Mapping[str, str], restarted: Mapping[str, str]) -> list[str]:
    """What the two do not say alike, from where they part."""
    found: list[str] = []
    for what in {**kept, **restarted}:
        one, other = kept.get(what, "nothing"), restarted.get(what, "nothing")
        if one != other:
            alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
            start = max(0, alike - 80)
            end = start + 240
            found.append(f"{what}\n  kept:      {one[start:end]}\n  restarted: {other[start:end]}")
    return found


async def all_live(one: Line) -> bool:
    """Whether nothing that has ended is known."""
    request = api.ListReservationsRequest(page_size=1000, show_ended=True)
    found = await one.client.allocator.ListReservations(request)
    return all(held.state == ACTIVE for held in found.reservations)


async def nobody_waits(one: Line) -> bool:
    """Whether the queue is empty."""
    found = await one.client.quotas.ListQuotas(api.ListQuotasRequest())
    return not any(quota.waiting_count for quota in found.quotas)


async def none_beyond(one: Line, nodes: Mapping[str, monitor_api.Node]) -> bool:
    """Whether nothing is held but what these nodes have."""
    there = {gpu.uuid for node in nodes.values() for gpu in node.snapshot.gpus}
    request = api.ListReservationsRequest(page_size=1000)
    held = (await one.client.allocator.ListReservations(request)).reservations
    return all(gpu.uuid in there for live in held for gpu in live.gpus)


async def unknown(one: Line, node: str) -> bool:
    """Whether a node is forgotten."""
    return node not in {found.name for found in (await one.ranked()).nodes}
