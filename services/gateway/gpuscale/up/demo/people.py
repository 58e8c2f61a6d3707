"""People of the demo, who reserve GPUs, use them well or badly, and give them back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from uuid import UUID

import grpc

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.common.errors import GpuscaleError
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.wire import to_duration
from gpuscale.up.demo.hosts import DemoProgram, DemoSite

LEASE = 30.0
"""Seconds of a lease, renewed three times as often."""
PATIENCE = 6 * 3600.0
"""Seconds that they wait in the queue."""


@dataclass(frozen=True, slots=True)
class Habit:
    """What a person does again and again; times are (least, most) in hours of the demo's day."""

    user: str
    tenant: str
    program: str
    gpus: int
    lasts: tuple[float, float]
    rests: tuple[float, float]
    load: float  # percent of its GPUs that it uses; 0 for who holds and forgets
    memory: float  # part of each GPU's memory
    nodes: Sequence[str] = ()  # where; anywhere when empty
    members: int = 1
    priority: int = 0
    labels: tuple[tuple[str, str], ...] = ()


async def live(habit: Habit, site: DemoSite, allocator: grpc.aio.Channel, seed: str) -> None:
    """Reserve, use, give back, rest; for ever. What is refused is tried again after the next rest."""
    random = Random(f"{seed}/{habit.user}/{habit.program}")
    stub = allocator_api.AllocatorServiceStub(allocator)
    await site.sleep(random.uniform(0.0, 0.05))
    while True:
        with suppress(GpuscaleError), rpc_errors():
            await _use(habit, site, stub, random)
        await site.sleep(random.uniform(*habit.rests))


async def _use(
    habit: Habit, site: DemoSite, stub: allocator_api.AllocatorServiceAsyncStub, random: Random
) -> None:
    """One reservation, from the request to its end."""
    nodes = habit.nodes or list(site.hosts)
    ask = allocator_api.Ask(gpu_count=habit.gpus, nodes=[f"nodes/{one}" for one in nodes])
    if habit.members > 1:
        ask.member_count = habit.members
        ask.gang_strategy = allocator_api.GangStrategy.GANG_STRATEGY_PACK
    request = allocator_api.ReserveRequest(
        request_id=str(UUID(int=random.getrandbits(128), version=4)),
        holder=habit.user,
        ask=ask,
        ttl=to_duration(LEASE),
        wait=to_duration(PATIENCE),
        tenant=habit.tenant,
        priority=habit.priority,
        labels=dict(habit.labels),
        owner=habit.user,
    )
    lasts = random.uniform(*habit.lasts)
    granted = (await stub.Reserve(request)).reservation

    def load() -> float:
        return habit.load and habit.load + random.uniform(-6.0, 6.0)

    program = DemoProgram(habit.user, habit.program, load, habit.memory, granted.name)
    site.begin([gpu.uuid for gpu in granted.gpus], program)
    try:
        await _hold(granted, stub, site.hours() + lasts, site)
    finally:
        site.end(program)
    release = allocator_api.ReleaseReservationRequest(name=granted.name, fence=granted.fence)
    await stub.ReleaseReservation(release)


async def _hold(
    granted: allocator_api.Reservation,
    stub: allocator_api.AllocatorServiceAsyncStub,
    until: float,
    site: DemoSite,
) -> None:
    """Renew the lease until an hour of the day; an error of the allocator ends it, as a lost lease does."""
    while (left := (until - site.hours()) * 3600 / site.speed) > 0:
        await asyncio.sleep(min(left, LEASE / 3))
        renewal = allocator_api.RenewReservationRequest(
            name=granted.name, fence=granted.fence, ttl=to_duration(LEASE)
        )
        await stub.RenewReservation(renewal)
