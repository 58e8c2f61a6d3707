"""Fairness: whose turn it is, and what a quota still admits. Pure.

Higher priority first. Within a priority the tenant with the lowest dominant share comes first: the GPUs it holds,
divided by its weight (weighted dominant resource fairness, NSDI'11, of which GPUs are the only resource counted).
Within a tenant: arrival.
"""

import heapq
from collections import deque
from collections.abc import Collection, Iterator

from gpuscale.allocator.domain.model import WHOLE, Ask, Order
from gpuscale.allocator.domain.placement import Pick
from gpuscale.allocator.queueing.model import Obstacle, Reason, Waiter, World


def share(world: World, tenant: str) -> float:
    """The dominant share of a tenant: thousandths of GPUs held per weight."""
    return world.gpu_milli_held(tenant) / world.quota(tenant).weight


def asked_milli(ask: Ask) -> int:
    """Thousandths of GPUs that an ask would hold at least: what memory alone takes depends on the size of the GPU."""
    by_memory = ask.gpu_memory_bytes is not None and ask.gpu_milli >= WHOLE
    return ask.member_count * ask.gpu_count * (1 if by_memory else ask.gpu_milli)


def over_quota(world: World, order: Order, pick: Pick | None = None) -> Obstacle | None:
    """Why the quota of its tenant does not admit an order, or what was found for it; None when it does."""
    limit = world.quota(order.tenant).gpu_milli_limit
    if limit is None:
        return None
    held, least = world.gpu_milli_held(order.tenant), asked_milli(order.ask)
    asked = least if pick is None else sum(gpu.milli for gpu in pick.gpus)
    if not asked or held + asked <= limit:
        return None
    remedy = "Ask for less" if asked > limit else "Release some"
    return Obstacle(
        Reason.QUOTA_EXCEEDED,
        f"tenant {order.tenant} may hold {_gpus(limit)} GPUs and holds {_gpus(held)}; this asks for {_gpus(asked)}."
        f" {remedy}, or have the quota raised.",
        lasting=least > limit,
    )


def in_turn(waiters: Collection[Waiter], promised: Collection[Waiter], world: World) -> Iterator[Waiter]:
    """The waiters in the order in which they are to be served.

    Shares are read as the iteration goes, so what is granted on the way counts. A waiter that was promised GPUs comes
    before the others of its priority: else a change of shares would move the promise, and nobody would ever fill it.
    """
    groups: dict[tuple[int, bool, str], deque[Waiter]] = {}
    for waiter in sorted(waiters, key=lambda one: one.number):
        key = (-waiter.priority, waiter not in promised, waiter.order.tenant)
        groups.setdefault(key, deque()).append(waiter)
    turns = [(key[:2], _share_of(key, world), group[0].number, key) for key, group in groups.items()]
    heapq.heapify(turns)
    while turns:
        rank, known, number, key = heapq.heappop(turns)
        if (now := _share_of(key, world)) != known:
            heapq.heappush(turns, (rank, now, number, key))
            continue
        group = groups[key]
        yield group.popleft()
        if group:
            heapq.heappush(turns, (rank, _share_of(key, world), group[0].number, key))


def _share_of(group: tuple[int, bool, str], world: World) -> float:
    _, unpromised, tenant = group
    return share(world, tenant) if unpromised else 0.0


def _gpus(milli: int) -> str:
    return f"{milli / WHOLE:g}"
