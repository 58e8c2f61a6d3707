"""Whom the autoscaler deals with in a world of virtual time: an allocator whose leases run out, adapters that can be wrong."""

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.autoscaler.servicers.adapter_servicer import AdapterServicer
from gpuscale.common.errors import GpuscaleError, ResourceExhaustedError, UnavailableError
from gpuscale.common.runtime.tasks import wait_at_most
from gpuscale.common.wire import seconds
from gpuscale.internal.autoscaler import v1 as autoscaler_internal
from tests.support.fake_adapter import ALIVE, FAILED, READY, STARTING, FakeAdapter
from tests.support.fake_allocator import ACTIVE, FakeAllocator

MOST_EFFECTS = 30_000
FOREIGN = "reservations/foreign"


class Life:
    """One run of the autoscaler: after so many effects it does nothing any more, and answers nobody."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self.left: int | None = None
        self.dead = asyncio.Event()
        self.over = False
        self.effects = 0

    async def step(self) -> None:
        """Before and after each effect; somebody else may come first."""
        if self.over:
            raise asyncio.CancelledError
        for _ in range(self._dice.randrange(3)):
            await asyncio.sleep(0)
        self.effects += 1
        assert self.effects < MOST_EFFECTS, "somebody repeats himself without end"
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.dead.set()
        if self.dead.is_set():
            while not self.over:  # what nobody may interrupt ends here too
                await asyncio.sleep(0.01)
            raise asyncio.CancelledError


class LeasingAllocator(FakeAllocator):
    """An allocator whose leases run out."""

    def __init__(self, nodes: dict[str, list[str]], dice: random.Random) -> None:
        super().__init__(nodes)
        self._dice = dice
        self._until: dict[str, float] = {}
        self._ttl: dict[str, float] = {}
        self.slow = 0.0
        self.losing = 0.0

    def called(self, method: str) -> None:
        now = asyncio.get_running_loop().time()
        for name, until in self._until.items():
            if until <= now and self.reservations[name].state == ACTIVE:
                self.expire(name)
        for node, (until, _) in self.drained.items():
            if until <= now:
                self.end(node)
        super().called(method)

    async def _late(self) -> None:
        if self.slow:
            await asyncio.sleep(self._dice.random() * self.slow)

    def _lose(self) -> None:
        if self._dice.random() < self.losing:
            raise UnavailableError("the answer was lost")

    async def Reserve(self, request: Any, context: Any) -> Any:
        await self._late()
        try:
            answer = await super().Reserve(request, context)
        except ResourceExhaustedError as error:
            raise ResourceExhaustedError(error.message, reason="NO_CAPACITY", retry_after=5.0) from error
        name, now = answer.reservation.name, asyncio.get_running_loop().time()
        if name not in self._until:
            self._ttl[name] = seconds(request.ttl)
            self._until[name] = now + self._ttl[name]
        self._lose()
        return answer

    async def RenewReservation(self, request: Any, context: Any) -> Any:
        await self._late()
        answer = await super().RenewReservation(request, context)
        self._until[request.name] = asyncio.get_running_loop().time() + self._ttl[request.name]
        self._lose()
        return answer

    async def ReleaseReservation(self, request: Any, context: Any) -> Any:
        await self._late()
        answer = await super().ReleaseReservation(request, context)
        self._lose()
        return answer

    def foreign(self, node: str) -> None:
        """Let somebody else hold a GPU."""
        free = [uuid for uuid in self.nodes[node] if uuid not in self.held]
        gpus = [allocator_api.ReservedGpu(node=f"nodes/{node}", uuid=free[0])]
        self.reservations[FOREIGN] = allocator_api.Reservation(
            name=FOREIGN, holder="somebody", state=ACTIVE, fence=77, gpus=gpus
        )


class WorldAdapter(FakeAdapter):
    """An adapter that can be away, slow, silent, and wrong; its replicas outlive its connections."""

    def __init__(self, name: str, dice: random.Random, **fields: Any) -> None:
        super().__init__(name, **fields)
        self._dice = dice
        self.away = False
        self.lag = 0.0
        self.crashes = 0.0
        self.lies = False
        self.busy: dict[str, tuple[str, ...]] = {}
        self.doubly: list[str] = []
        self._up = asyncio.Event()

    def _obey(self, line: autoscaler_internal.DesiredReplica) -> None:
        new = line.replica not in self.states and line.goal == autoscaler_internal.DesiredReplica.GOAL_RUN
        super()._obey(line)
        if new:
            self.busy[line.replica] = tuple(line.gpu_uuids)

    def held(self) -> list[str]:
        """GPUs that processes use."""
        return [uuid for name in self.alive for uuid in self.busy.get(name, ())]

    def some_end(self) -> None:
        """Some replicas crash, some that start are ready, where the dice say so."""
        before = dict(self.states)
        for name, state in before.items():
            if state in ALIVE and self._dice.random() < self.crashes:
                self.states[name] = FAILED
            elif state == STARTING and (self.makes_ready or self._dice.random() < 0.3):
                self.states[name] = READY
        if self.states != before:
            self._changed.set()

    async def stay(self, world: Any) -> None:
        """Be connected to whoever is the autoscaler."""
        while True:
            servicer, life = world.servicer, world.life
            if self.away or servicer is None or life.dead.is_set():
                await asyncio.sleep(0.3)
                continue
            with suppress(GpuscaleError):
                await self._converse(servicer, life)
            await asyncio.sleep(1.0)

    async def _converse(self, servicer: AdapterServicer, life: Life) -> None:
        self._revision = 0
        stream = servicer.Connect(self._messages(life), None)  # type: ignore[arg-type]
        watch = asyncio.create_task(self._until_gone(life))
        try:
            while True:
                update = asyncio.ensure_future(anext(stream, None))
                await asyncio.wait({update, watch}, return_when=asyncio.FIRST_COMPLETED)
                if not update.done():
                    update.cancel()
                    await asyncio.gather(update, return_exceptions=True)
                    return
                response = update.result()
                if response is None:
                    return
                if self.lag:
                    await asyncio.sleep(self._dice.random() * self.lag)
                self._revision = response.revision
                self.revisions.append(response.revision)
                for line in response.replicas:
                    self._obey(line)
                self._changed.set()
        finally:
            watch.cancel()
            await stream.aclose()

    async def _until_gone(self, life: Life) -> None:
        while not self.away and not life.dead.is_set():
            await asyncio.sleep(0.2)

    async def _messages(self, life: Life) -> AsyncGenerator[autoscaler_internal.ConnectRequest]:
        yield autoscaler_internal.ConnectRequest(register=self.register)
        while not self.away and not life.over:
            self._changed.clear()
            if self.lag:
                await asyncio.sleep(self._dice.random() * self.lag)
            if not self.silent:
                report = autoscaler_internal.Report(
                    revision=self._revision if self.acknowledges else 0, replicas=self._seen()
                )
                yield autoscaler_internal.ConnectRequest(report=report)
            await wait_at_most(self._changed, 4.0)
            await asyncio.sleep(0.01)

    def _seen(self) -> list[autoscaler_internal.ReplicaReport]:
        seen = [
            autoscaler_internal.ReplicaReport(replica=name, state=state, pid=7 if state in ALIVE else 0)
            for name, state in self.states.items()
        ]
        if self.lies:
            self._dice.shuffle(seen)
            what = self._dice.randrange(4)
            if what == 0 and seen:
                seen.append(seen[0])  # twice
            elif what == 1:
                seen.append(
                    autoscaler_internal.ReplicaReport(replica="endpoints/nobody/replicas/x", state=READY)
                )
            elif what == 2 and self.doubly:
                seen.append(
                    autoscaler_internal.ReplicaReport(replica=self._dice.choice(self.doubly), state=READY)
                )
            elif what == 3:
                seen = seen[1:]
        return seen
