"""Everything that scales, in one loop on virtual time: the real reconciler, actor, leases, hub and adapter service.

The store is in memory, the allocator and the adapters are made up. A life of the autoscaler ends when `left` effects
(of the store, the allocator or an adapter's stream) have happened, before or after one of them, as by kill -9; what is
stored, what is reserved and what runs stays for the next life.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import ExitStack, aclosing
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch
from uuid import UUID

from sqlalchemy import Connection, StaticPool, create_engine

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.autoscaler.domain.signals import QueueReading, QueueState
from gpuscale.autoscaler.domain.spec import EndpointSpec
from gpuscale.autoscaler.loop import reconciler
from gpuscale.autoscaler.loop.hub import AdapterHub, Followers, Wakes
from gpuscale.autoscaler.loop.leases import Actor, LeaseKeeper, Reservations
from gpuscale.autoscaler.loop.precedence import Precedence
from gpuscale.autoscaler.loop.reconciler import Dependencies, Reconciler
from gpuscale.autoscaler.servicers.adapter_servicer import AdapterServicer
from gpuscale.autoscaler.servicers.endpoints import Endpoints
from gpuscale.autoscaler.servicers.feeds import Feeds
from gpuscale.autoscaler.signals import sources
from gpuscale.autoscaler.signals.fleet import FleetMetrics
from gpuscale.autoscaler.signals.polling import Poller, room_for, waiting_requests
from gpuscale.autoscaler.state import store
from gpuscale.autoscaler.state.decision_log import Repetitions
from gpuscale.common.errors import GpuscaleError, UnavailableError
from gpuscale.common.runtime import tasks as backoff
from gpuscale.common.runtime.tasks import TaskScope
from gpuscale.common.security import auth
from gpuscale.common.store.store import Store
from tests.property.autoscaler.scaling_doubles import LeasingAllocator, Life, WorldAdapter
from tests.support.clock import LoopClock
from tests.support.fake_allocator import FakeCapacity

T = TypeVar("T")


class MemoryStore(Store):
    """The store without threads and files."""

    def __init__(self, connection: Connection, life: Life) -> None:
        self._connection, self._life = connection, life
        self.failing = False

    async def write(self, work: Callable[[Connection], T], *, frees: bool = False) -> T:
        await self._life.step()
        if self.failing:
            raise UnavailableError("the disk is full", reason="DISK_FULL")
        with self._connection.begin():
            value = work(self._connection)
        await self._life.step()
        return value

    async def read(self, work: Callable[[Connection], T]) -> T:
        await self._life.step()
        with self._connection.begin():
            return work(self._connection)


class Wire:
    """A channel to a servicer in this process: what is sent arrives, unless it gets lost."""

    def __init__(self, life: Life, *servicers: object) -> None:
        self._life, self._servicers = life, servicers

    def unary_unary(self, path: str, **_: object) -> Callable[..., Coroutine[Any, Any, Any]]:
        method = path.rpartition("/")[2]
        found = [getattr(one, method, None) for one in self._servicers]
        return partial(self._call, next((one for one in found if one is not None), None))

    stream_unary = stream_stream = unary_unary

    def unary_stream(self, path: str, **_: object) -> Callable[..., AsyncGenerator[Any]]:
        return partial(self._stream, path.rpartition("/")[2])

    async def _stream(self, name: str, request: Any, **_: Any) -> AsyncGenerator[Any]:
        [method] = [getattr(one, name) for one in self._servicers if hasattr(one, name)]
        async with aclosing(method(request, None)) as answers:
            async for answer in answers:
                await self._life.step()
                yield type(answer).FromString(answer.SerializeToString())

    async def _call(
        self, method: Callable[[Any, Any], Coroutine[Any, Any, Any]] | None, request: Any, **_: Any
    ) -> Any:
        assert method is not None
        await self._life.step()
        answer = await method(request, None)
        await self._life.step()
        return type(answer).FromString(answer.SerializeToString())


class World:
    """The site: allocator, adapters, one database, and lives of the autoscaler on it."""

    def __init__(self, seed: int, nodes: dict[str, list[str]], adapters: list[dict[str, Any]]) -> None:
        self.dice = random.Random(seed)
        self.clock = LoopClock()
        self.allocator = LeasingAllocator(nodes, self.dice)
        self.adapters = [WorldAdapter(dice=self.dice, **fields) for fields in adapters]
        self.queues: dict[str, int | None] = {"jobs": 0}
        engine = create_engine("sqlite://", poolclass=StaticPool)
        self.connection = engine.connect()
        store.METADATA.create_all(engine)
        self.connection.commit()
        self.life = Life(self.dice)
        self.servicer: AdapterServicer | None = None
        self.failure: BaseException | None = None
        self.lives = 0
        self._born = asyncio.Event()

    def reading(self, watcher: str) -> QueueReading | None:
        if watcher not in self.queues:
            return None
        depth = self.queues[watcher]
        if depth is None:
            return QueueReading(QueueState.UNREACHABLE, message="gone")
        return QueueReading(QueueState.OK, depth, 0, 1, self.clock.now())

    async def live(self) -> None:
        """Live, die and be born again until cancelled."""
        while True:
            self.life = life = Life(self.dice)
            task = asyncio.create_task(self._one_life(life), name="autoscaler")
            dying = asyncio.create_task(life.dead.wait())
            try:
                await asyncio.wait({task, dying}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                life.over = True
                self.servicer = None
                life.dead.set()
                self._born.clear()
                dying.cancel()
                ended = task.done()
                task.cancel()
                [result] = await asyncio.gather(task, return_exceptions=True)
            if ended and isinstance(result, BaseException):
                self.failure = result
                self._born.set()  # nobody need wait for another life
                raise result
            await asyncio.sleep(self.dice.random() * 3)

    async def _one_life(self, life: Life) -> None:
        self.lives += 1
        state = self.state = MemoryStore(self.connection, life)
        starts, _ = await state.write(partial(store.begin, boot_id=self.clock.boot_id))
        wire: Any = Wire(life, self.allocator, FakeCapacity(self.allocator))
        self.sources = sources.SignalSources(
            reading=self.reading,
            reported=sources.ReportedMetrics(),
            servers=sources.ReplicaServers(self.clock),
            fleet=FleetMetrics(wire, self.clock),
            prometheus={},
            waiting=Poller(partial(waiting_requests, allocator_api.QuotaServiceStub(wire)), self.clock),
            room=Poller(partial(room_for, allocator_api.CapacityServiceStub(wire)), self.clock),
            clock=self.clock,
        )
        wakes, followers, uses = Wakes(), Followers(), sources.WatcherUses()
        self.wakes = wakes
        hub = self.hub = AdapterHub(state, self.clock, starts, wakes)
        reservations = Reservations(wire, wakes)
        self.histories = sources.Histories(self.reading, state)
        repetitions = self.repetitions = Repetitions(state)
        keeper = self.keeper = LeaseKeeper(state, reservations, self.clock, hub, wakes)
        actor = Actor(state, self.clock, hub, reservations)
        deps = Dependencies(
            state, self.clock, self.sources, hub, actor, keeper, uses, followers, self.histories,
            repetitions, Precedence(state, self.clock, hub, wire, wakes, self.sources.busy),
        )  # fmt: skip
        self.endpoints = Endpoints(
            deps, wakes, watcher_exists=lambda watcher: watcher in self.queues, prometheus=[]
        )
        self.uses = uses
        async with TaskScope() as scope:
            scope.spawn("renew leases", keeper.renew_forever())
            scope.spawn("release leases", keeper.release_forever())
            scope.spawn("follow revocations", keeper.follow_revocations())
            scope.spawn("save counts", repetitions.run())
            scope.spawn("room", self.sources.room.run())
            scope.spawn("stand in the queue", reservations.places.run())
            self.reconciler = Reconciler(deps, wakes)
            scope.spawn("reconcile endpoints", self.reconciler.run())
            self.servicer = AdapterServicer(
                hub, scope, Feeds(deps, lambda: (), lambda: ()), self.sources.servers
            )
            self._born.set()
            await asyncio.Event().wait()

    async def user(self, work: Callable[[Endpoints], Coroutine[Any, Any, Any]]) -> str:
        """What a user asks for; comes to the name of the error, or to nothing. A dead autoscaler does not answer."""
        await self._born.wait()
        assert self.failure is None, self.failure
        life = self.life
        asked = asyncio.ensure_future(work(self.endpoints))
        dead = asyncio.ensure_future(life.dead.wait())
        await asyncio.wait({asked, dead}, return_when=asyncio.FIRST_COMPLETED)
        dead.cancel()
        if not asked.done():
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            return "dead"
        error = asked.exception() if not asked.cancelled() else None
        if error is None:
            return ""
        if not isinstance(error, GpuscaleError):
            raise error
        return type(error).__name__

    async def create(self, name: str, spec: EndpointSpec) -> str:
        request = str(UUID(int=self.dice.getrandbits(128), version=4))
        return await self.user(
            lambda e: e.create(name, spec, request_id=request, fingerprint=request, validate_only=False)
        )

    def rows(self) -> list[store.Replica]:
        with self.connection.begin():
            return store.replicas(self.connection)


def seeded(world: World) -> ExitStack:
    """Everybody is somebody's principal; ids, and waits between attempts, come from the dice."""
    stack = ExitStack()
    stack.enter_context(patch.object(backoff, "_random", world.dice))
    stack.enter_context(
        patch.object(reconciler, "uuid4", lambda: UUID(int=world.dice.getrandbits(128), version=4))
    )
    token = auth._current.set(auth.LOCAL)
    stack.callback(auth._current.reset, token)
    return stack
