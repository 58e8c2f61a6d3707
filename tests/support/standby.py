"""Two throwaway servers of one service, of which one leads: the other answers NOT_LEADER, as a standby does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.errors import UnavailableError
from gpuscale.internal.monitor import v1 as monitor_internal
from tests.support.throwaway import Allocator, Fleet, Served, serve


@dataclass
class Member:
    """One of the two. Every kind of call notes itself and is refused while another leads."""

    name: str
    leads: bool = False
    told: dict[str, str] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    hold: bool = False
    served: Served | None = None

    @property
    def address(self) -> str:
        return self.served.address

    def refuse(self, kind: str) -> None:
        self.calls.append(kind)
        if not self.leads:
            raise UnavailableError("another leads", reason="NOT_LEADER", metadata=self.told, retry_after=0.2)

    async def work(self, request: Any, context: Any) -> Any:
        self.metadata = dict(context.invocation_metadata() or ())
        self.refuse("unary")
        self.begun.set()
        if self.hold:
            await asyncio.Event().wait()
        return Allocator.answer()

    async def nodes(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.refuse("nodes")
        yield monitor_api.WatchNodesResponse(full=True)
        if self.hold:
            await asyncio.Event().wait()

    async def telemetry(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        self.refuse("telemetry")
        async for _ in requests:
            yield monitor_internal.StreamTelemetryResponse(acked_seq=7)


@dataclass
class Pair:
    """Both servers. `addresses` is what a client is given."""

    first: Member
    second: Member
    stack: dict[str, AsyncExitStack]

    @property
    def addresses(self) -> str:
        return f"{self.first.address},{self.second.address}"

    def lead(self, member: Member | None) -> None:
        """From now on that one leads, or none; the other knows."""
        for one in (self.first, self.second):
            one.leads = one is member
            one.told = {} if member is None else {"leader": member.address}

    async def stop(self, member: Member) -> None:
        await self.stack[member.name].aclose()


@asynccontextmanager
async def two_servers() -> AsyncIterator[Pair]:
    """Both, the first leading."""
    stacks: dict[str, AsyncExitStack] = {}
    members = (Member("first"), Member("second"))
    async with AsyncExitStack() as all_of_them:
        for member in members:
            stack = stacks[member.name] = await all_of_them.enter_async_context(AsyncExitStack())
            service = serve(Allocator(member.work), Fleet(member.nodes, member.telemetry))
            member.served = await stack.enter_async_context(service)
        pair = Pair(*members, stacks)
        pair.lead(pair.first)
        yield pair
