"""All that can be seen of an allocator over gRPC, in words that do not depend on the life that says them."""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from gpuscale.api.allocator import v1 as api
from gpuscale.api.monitor import v1 as monitor_api
from tests.integration.allocator.restart_site import MIB
from tests.integration.allocator.restarted import ACTIVE, BEACON, Line

FIRSTFIT = api.PlacementPolicy.PLACEMENT_POLICY_FIRSTFIT
PAGE = 3
"""A small page, so that a list has several."""
_NODES = ("nodes/n0", "nodes/n1", "nodes/n2", "nodes/n3")


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
