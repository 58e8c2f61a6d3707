"""GPUs of replicas: reserved while they are pending, renewed while they live, released once they ended.

Every step may be the last one before a crash. The row says which nodes a Reserve was sent for until its answer is known; after
a crash the same request is sent again, and returns what it was granted, or that it was granted nothing.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterable, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain

import grpc

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.autoscaler.domain.decisions import Code, Stage
from gpuscale.autoscaler.domain.planning import AdapterFacts, by_tier, candidates, nobody
from gpuscale.autoscaler.domain.replicas import (
    SAME_MOMENT,
    EndReason,
    Goal,
    Moment,
    Replica,
    ReplicaLease,
    ReplicaState,
    asked_to_stop,
    assigned,
    ended,
    revoked,
)
from gpuscale.autoscaler.domain.spec import Endpoint
from gpuscale.autoscaler.loop.hub import AdapterHub, Wakes
from gpuscale.autoscaler.loop.precedence import RETRY, StartRefusal
from gpuscale.autoscaler.state import store
from gpuscale.autoscaler.state.store import Connection
from gpuscale.autoscaler.wire.specs import ask_to_wire
from gpuscale.common import errors
from gpuscale.common.names import endpoint_name, node_name, node_of, replica_name
from gpuscale.common.rpc.channel import RPC_TIMEOUT
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import Backoff, Clock, TaskScope, endings, hit_async, wait_at_most
from gpuscale.common.store.store import Store
from gpuscale.common.wire import enum_word, seconds, to_datetime, to_duration

STAY = 60.0
"""Seconds after which a place is requested again, on the nodes of that time."""


@dataclass(frozen=True, slots=True)
class ReplicaGrant:
    """Reserved GPUs, the id of their node, and their product names."""

    lease: ReplicaLease
    node: str
    products: frozenset[str] = frozenset()


class StandsInQueueError(errors.ResourceExhaustedError):
    """A request waits in the queue; `message` has its place."""


@dataclass(eq=False)
class _Place:
    endpoint: str
    request: allocator_api.ReserveRequest
    heard: asyncio.Event = field(default_factory=asyncio.Event)
    waits: allocator_api.QueuePlace | None = None
    answer: allocator_api.ReserveAndWatchResponse | None = None
    error: errors.GpuscaleError | None = None
    task: asyncio.Task[None] = field(init=False)

    @property
    def over(self) -> bool:
        return self.answer is not None or self.error is not None

    @property
    def refusal(self) -> errors.ResourceExhaustedError:
        text = "the allocator has not looked at it yet" if self.waits is None else self.waits.message
        reason = "NO_CAPACITY" if self.waits is None else enum_word(self.waits, "reason")
        return errors.ResourceExhaustedError(
            text, reason="QUOTA_EXCEEDED" if reason == "QUOTA_EXCEEDED" else "NO_CAPACITY"
        )


class Places:
    """The places of replicas in the allocator's queue; `run` must run.

    A place keeps what is freed from all behind it. Each is a stream. A crash loses it, and repeating the request returns what it
    was granted.
    """

    def __init__(self, stub: "allocator_api.AllocatorServiceAsyncStub", wakes: Wakes) -> None:
        self._stub = stub
        self._wakes = wakes
        self._scope = TaskScope()
        self._places: dict[str, _Place] = {}

    async def run(self) -> None:
        """Wait in the queue for them, for ever."""
        async with self._scope:
            await asyncio.Event().wait()

    async def ask(
        self, replica: Replica, request: allocator_api.ReserveRequest, *, stays: bool
    ) -> allocator_api.ReserveAndWatchResponse:
        """Returns what a replica is granted now, or was while it waited. Raises its place, which it keeps if it `stays`."""
        request.wait.CopyFrom(to_duration(STAY))
        place = self._places.get(replica.id)
        if place is not None and not place.over and (not stays or place.request != request):
            await self.leave(replica.id)  # once it has left, a repeated request shows whether it was granted
            place = None
        if place is None:
            place = self._places[replica.id] = _Place(replica.endpoint, request)
            place.task = self._scope.start(f"place of {replica.id}", self._stand(place))
        try:
            async with asyncio.timeout(RPC_TIMEOUT):
                await place.heard.wait()
        except TimeoutError:
            await self.leave(replica.id)
            raise errors.UnavailableError("no answer to a request for GPUs") from None
        if not place.over and stays:
            before = place.waits.position if place.waits else 0
            where = f"{before} before it" if before else "next"
            raise StandsInQueueError(f"{where} in the allocator's queue; {place.refusal.message}")
        await self.leave(replica.id)
        if place.answer is not None:
            return place.answer
        error = place.error
        raise place.refusal if error is None or error.reason == "WAIT_TIMEOUT" else error

    async def leave(self, replica: str) -> None:
        """Leave the queue, if it waits there. A simultaneous grant is found by asking again, or runs out."""
        if (place := self._places.pop(replica, None)) is not None:
            place.task.cancel()
            await asyncio.wait([place.task])

    async def _stand(self, place: _Place) -> None:
        asked = allocator_api.ReserveAndWatchRequest(reserve=place.request)
        try:
            with rpc_errors():
                async for news in self._stub.ReserveAndWatch(asked, timeout=STAY + RPC_TIMEOUT):
                    if news.HasField("reservation"):
                        place.answer = news
                        break
                    place.waits = news.waiting
                    place.heard.set()
        except errors.GpuscaleError as error:
            place.error = error
        if not place.over:
            place.error = errors.UnavailableError("the allocator ended the stream")
        stood = place.heard.is_set()
        place.heard.set()
        if stood:
            self._wakes.call(place.endpoint, changed=False)


class Reservations:
    """Reserves, renews and releases. Every call may be repeated, thanks to the replica's request id."""

    def __init__(self, channel: grpc.aio.Channel, wakes: Wakes) -> None:
        self._stub = allocator_api.AllocatorServiceStub(channel)
        self.places = Places(self._stub, wakes)

    async def reserve(
        self, replica: Replica, endpoint: Endpoint, *, stays: bool = False
    ) -> ReplicaGrant | None:
        """The GPUs of a replica, on one of its `nodes`: newly granted, or as an earlier call was, unless that has ended.

        They count against the endpoint's tenant, and belong to its creator; our own by default. If it has a priority, a request
        that `stays` joins the queue (`StandsInQueueError`). Nothing was reserved after ResourceExhaustedError (NO_CAPACITY),
        AlreadyExistsError (an earlier call asked for other nodes) and those of `_NOTHING_RESERVED`; after others it may have
        been.
        """
        template, priority = replica.template, endpoint.spec.priority
        request = allocator_api.ReserveRequest(
            request_id=replica.request_id,
            holder=replica_name(replica.endpoint, replica.id),
            ask=ask_to_wire(template, replica.nodes),
            ttl=to_duration(template.ttl),
            labels={"endpoint": endpoint_name(replica.endpoint)},
            tenant=endpoint.tenant,
            owner=endpoint.creator,
            priority=priority or 0,
            movable=None if template.movable is None else to_duration(template.movable),
        )
        answer: allocator_api.ReserveResponse | allocator_api.ReserveAndWatchResponse
        if priority is None:
            await self.places.leave(replica.id)
            with rpc_errors():
                answer = await self._stub.Reserve(request, timeout=RPC_TIMEOUT)
        else:
            answer = await self.places.ask(replica, request, stays=stays)
        granted = answer.reservation
        if granted.state != allocator_api.Reservation.STATE_ACTIVE:
            return None
        uuids = tuple(gpu.uuid for gpu in granted.gpus)
        lease = ReplicaLease(granted.name, granted.fence, uuids, answer.lease_token)
        return ReplicaGrant(lease, node_of(granted.gpus[0]), frozenset(gpu.model for gpu in granted.gpus))

    async def renew(self, lease: ReplicaLease) -> None:
        """Renew a lease. NotFoundError or FailedPreconditionError: it seems to have ended; other errors prove nothing."""
        request = allocator_api.RenewReservationRequest(name=lease.reservation, fence=lease.fence)
        with rpc_errors():
            await self._stub.RenewReservation(request, timeout=RPC_TIMEOUT)

    def revoked(self) -> AsyncIterable[allocator_api.WatchReservationsResponse]:
        """Reservations of any holder that will be revoked: first all, then changes. Raises RPC errors while it is read."""
        return self._stub.WatchReservations(allocator_api.WatchReservationsRequest(revoked=True))

    async def holds(self, lease: ReplicaLease) -> bool:
        """Whether a lease still holds its GPUs. Raises GpuscaleError if unknown."""
        request = allocator_api.GetReservationRequest(name=lease.reservation)
        try:
            with rpc_errors():
                found = (await self._stub.GetReservation(request, timeout=RPC_TIMEOUT)).reservation
        except errors.NotFoundError:
            return False
        return found.state == allocator_api.Reservation.STATE_ACTIVE and found.fence == lease.fence

    async def release(self, lease: ReplicaLease) -> None:
        """Release the GPUs of a lease. NotFoundError or FailedPreconditionError: nothing of ours is left."""
        request = allocator_api.ReleaseReservationRequest(name=lease.reservation, fence=lease.fence)
        with rpc_errors():
            await self._stub.ReleaseReservation(request, timeout=RPC_TIMEOUT)


AGAIN = 0.1
"""Seconds until a retry that may make progress now."""
MAX_NODES = 1_000
UNKNOWN_NODE_REST = 30.0
"""Seconds for which a node unknown to the allocator is not requested."""

QUOTA_EXCEEDED = "QUOTA_EXCEEDED"
"""The allocator's reason if a tenant is at its quota."""

_NOTHING_RESERVED = (
    errors.FailedPreconditionError,
    errors.InvalidArgumentError,
    errors.NotFoundError,
    errors.PermissionDeniedError,
    errors.UnauthenticatedError,
)

ENGINES_GPUS: tuple[str, ...] = ()
"""In place of nodes: adapters whose engine assigns GPUs itself."""

_NOT_HERE = frozenset({Code.NO_CAPACITY, Code.UNSATISFIABLE})
"""With these reasons the next tier of adapters is tried."""


class Actor:
    """Starts pending replicas one after another."""

    def __init__(self, store: Store, clock: Clock, hub: AdapterHub, reservations: Reservations) -> None:
        self._store = store
        self._clock = clock
        self._hub = hub
        self._reservations = reservations
        self._unknown_nodes: dict[str, float] = {}

    async def act(
        self, replicas: Iterable[Replica], endpoint: Endpoint, spilled: dict[str, str] | None = None
    ) -> StartRefusal | None:
        """Advance an endpoint's pending replicas as far as possible, first those with an outstanding Reserve.

        `spilled` collects why replicas, by id, get GPUs of a less preferred model.
        """
        pending = [one for one in replicas if one.state is ReplicaState.PENDING]
        told: set[str] = set()
        refused: dict[str, StartRefusal] = {}  # by capability set: waiting for GPUs blocks no other
        try:
            for replica in sorted(pending, key=lambda one: not one.nodes):
                if replica.group.set in refused and endpoint.spec.priority is None:
                    continue
                refusal = await self._act_on(replica, endpoint, told, {} if spilled is None else spilled)
                if refusal is not None:
                    refused.setdefault(replica.group.set, refusal)
        finally:
            await self._hub.refresh(told)
        return next(iter(refused.values()), None)

    async def _act_on(
        self, replica: Replica, endpoint: Endpoint, told: set[str], spilled: dict[str, str]
    ) -> StartRefusal | None:
        if replica.template.gpu_count == 0:
            return await self._assign(replica, None, told)
        adapters = self._hub.facts()
        tiers = [] if replica.goal is Goal.STOP else await self._nodes(replica, adapters)
        if not tiers and replica.goal is Goal.RUN:
            return self._nobody(replica, adapters)  # an earlier grant waits until its adapter is back
        if replica.nodes or not tiers:
            return await self._reserve(replica, endpoint, told)
        refusal, before = None, ""
        ways = [(model, nodes) for model in replica.template.of_each_model() for nodes in tiers]
        for model, nodes in ways:
            if nodes == ENGINES_GPUS:
                return await self._assign(replace(replica, nodes=()), None, told)
            asked = replace(replica, nodes=nodes, template=model)
            await self._save(asked)
            refusal = await self._reserve(asked, endpoint, told, stays=len(ways) == 1)
            if refusal is None and model.models != replica.template.models[:1]:
                spilled[replica.id] = f"on {model.models_in_words}; {before}"
            if refusal is None or refusal.code not in _NOT_HERE:
                return refusal
            before = before or f"no {model.models_in_words}: {refusal.text}"
        if len(ways) > 1 and endpoint.spec.priority is not None:
            replica = replace(replica, nodes=tuple(sorted(set(chain(*tiers)))[:MAX_NODES]))
            await self._save(replica)
            return await self._reserve(replica, endpoint, told, stays=True)
        return refusal

    async def _reserve(
        self, replica: Replica, endpoint: Endpoint, told: set[str], *, stays: bool = True
    ) -> StartRefusal | None:
        await hit_async("autoscaler.replica.after_intent")
        try:
            stays = stays and replica.goal is Goal.RUN
            grant = await self._reservations.reserve(replica, endpoint, stays=stays)
        except StandsInQueueError as error:
            return StartRefusal(Stage.GPU, Code.NO_CAPACITY, error.message)
        except errors.ResourceExhaustedError as error:
            if error.reason not in {Code.NO_CAPACITY, QUOTA_EXCEEDED}:  # the allocator is overloaded
                return _unavailable(error)
            code = Code.NO_CAPACITY if error.reason == Code.NO_CAPACITY else Code.REFUSED
            refusal = StartRefusal(Stage.GPU, code, error.message, _retry(error))
            return await self._refused(replica, endpoint, refusal)
        except errors.AlreadyExistsError as error:
            await self._end(replica, f"its request for GPUs was taken: {error.message}")
            return None
        except _NOTHING_RESERVED as error:
            return await self._refused(replica, endpoint, self._refusal(replica, error))
        except errors.GpuscaleError as error:
            return _unavailable(error)
        await hit_async("autoscaler.replica.after_reserve")
        if grant is None:
            await self._end(replica, "its reservation ended before it was used")
            return None
        if replica.goal is Goal.STOP:
            await self._end(replace(replica, lease=grant.lease), replica.reason)
            return None
        return await self._assign(replica, grant, told)

    async def _assign(
        self, replica: Replica, grant: ReplicaGrant | None, told: set[str]
    ) -> StartRefusal | None:
        """Write the adapter with the fewest replicas (on the node of the GPUs), which is then notified as one of `told`.

        Without one, the GPUs must be released.
        """
        adapters, at = self._hub.facts(), self._moment()

        def suits(one: AdapterFacts) -> bool:
            """Whether it has the granted GPUs; without a grant, whether it needs none."""
            if grant is not None:
                return one.node == grant.node and not one.capabilities.gives_gpus
            return replica.template.gpu_count == 0 or one.capabilities.gives_gpus

        def assign(connection: Connection) -> str | None:
            own = replica
            if grant is not None:
                own = replace(replica, template=replica.template.on(grant.products), lease=grant.lease)
            chosen = next(filter(suits, _able(connection, own, adapters)), None)
            if chosen is not None:
                node = grant.node if grant else chosen.node
                store.save_replica(connection, assigned(own, chosen.id, node, own.lease))
            elif own.lease is not None:
                reason = "its adapter went away while its GPUs were reserved"
                gone = ended(own, ReplicaState.STOPPED, reason, at, EndReason.ADAPTER_LACKS_IT)
                store.save_replica(connection, gone)
            return chosen.id if chosen else None

        adapter = await self._store.write(assign)
        if adapter is None:
            return self._nobody(replica, adapters)
        await hit_async("autoscaler.replica.after_record")
        told.add(adapter)
        return None

    async def _nodes(self, replica: Replica, adapters: Collection[AdapterFacts]) -> list[tuple[str, ...]]:
        """Its possible GPUs, tier by tier: nodes, except those unknown to the allocator, or an engine."""
        now = self._clock.now()
        self._unknown_nodes = {node: until for node, until in self._unknown_nodes.items() if until > now}
        able = await self._store.read(partial(_able, replica=replica, adapters=adapters))
        places: list[tuple[str, ...]] = []
        for tier in by_tier(replica.template, able):
            nodes = {one.node for one in tier if not one.capabilities.gives_gpus} - self._unknown_nodes.keys()
            if nodes:
                places.append(tuple(sorted(nodes)[:MAX_NODES]))
            if any(one.capabilities.gives_gpus for one in tier):
                places.append(ENGINES_GPUS)
        return places

    def _nobody(self, replica: Replica, adapters: Collection[AdapterFacts]) -> StartRefusal:
        facts = [one for one in adapters if one.node not in self._unknown_nodes]
        text = nobody(replica.template, facts, replica.group.asked.capabilities)
        if self._unknown_nodes:
            text += f" (except nodes unknown to the allocator: {', '.join(sorted(self._unknown_nodes))})"
        return StartRefusal(Stage.ACT, Code.NO_ADAPTER, text)

    def _refusal(self, replica: Replica, error: errors.GpuscaleError) -> StartRefusal:
        if isinstance(error, errors.NotFoundError):
            named = error.metadata.get("name", "").split(",")
            unknown = {one for one in replica.nodes if node_name(one) in named}
            self._unknown_nodes |= dict.fromkeys(unknown, self._clock.now() + UNKNOWN_NODE_REST)
            if set(replica.nodes) - self._unknown_nodes.keys():
                return StartRefusal(Stage.GPU, Code.REFUSED, error.message, retry_after=AGAIN)
        code = Code.UNSATISFIABLE if error.reason == Code.UNSATISFIABLE else Code.REFUSED
        return StartRefusal(Stage.GPU, code, error.message, _retry(error))

    async def _refused(
        self, replica: Replica, endpoint: Endpoint, refusal: StartRefusal
    ) -> StartRefusal | None:
        """Nothing was reserved for it: it waits on, for any of its models, or is done if it should stop anyway."""
        if replica.goal is Goal.STOP:
            await self._end(replica, replica.reason)
            return None
        whole = endpoint.spec.of_set(replica.group.set).started_from
        template = whole if replica.template.is_of(whole) else replica.template
        await self._save(replace(replica, nodes=(), template=template))
        return refusal

    async def _end(self, replica: Replica, reason: str) -> None:
        await self._save(ended(replica, ReplicaState.STOPPED, reason, self._moment()))

    async def _save(self, replica: Replica) -> None:
        await self._store.write(partial(store.save_replica, one=replica), frees=True)

    def _moment(self) -> Moment:
        return Moment(self._clock.now(), self._clock.wall())


def _able(connection: Connection, replica: Replica, adapters: Collection[AdapterFacts]) -> list[AdapterFacts]:
    """The adapters that can run it, in the order in which to try them."""
    loads = store.loads(connection)
    own = Counter(one.adapter for one in store.replicas(connection, replica.endpoint) if one.adapter)
    return candidates(replica.template, list(adapters), loads, own, replica.group.asked.capabilities)


def _unavailable(error: errors.GpuscaleError) -> StartRefusal:
    text = f"the allocator does not answer: {error.message}"
    return StartRefusal(Stage.GPU, Code.ALLOCATOR_UNAVAILABLE, text, _retry(error))


def _retry(error: errors.GpuscaleError) -> float:
    return RETRY if error.retry_after is None else min(max(error.retry_after, 0.2), RETRY)


CONCURRENT = 16
"""Most concurrent calls of one kind to the allocator."""
RETRY_RENEWAL = 1.0
"""Seconds after which an unanswered renewal is retried."""
NEVER = datetime.max.replace(tzinfo=UTC)
LONGEST_WAIT = 60.0
"""Seconds after which the rows are read again even without a change."""

_log = get_logger(__name__)


class LeaseKeeper:
    """Three tasks: renew, release, follow revocations. `changed` signals that replicas came, ended, or got GPUs."""

    def __init__(
        self, store: Store, reservations: Reservations, clock: Clock, hub: AdapterHub, wakes: Wakes
    ) -> None:
        self._store = store
        self._reservations = reservations
        self._clock = clock
        self._hub = hub
        self._wakes = wakes
        self._renew = asyncio.Event()
        self._release = asyncio.Event()
        self._due: dict[str, float] = {}
        self._revoked: Mapping[str, tuple[float, datetime, str]] | None = None
        self._following = False
        self._over: set[str] = set()

    def changed(self) -> None:
        """Check the replicas again."""
        self._renew.set()
        self._release.set()

    async def renew_forever(self) -> None:
        """Renew every lease at each third of its ttl, including those of silent adapters; all of them at the start."""
        live: list[Replica] = []
        known = await self._leased()
        self._due = {replica.id: self._clock.now() for replica in known or ()}
        while True:
            live = live if known is None else known
            now = self._clock.now()
            over = {one.id: now for one in live if one.lease and one.lease.reservation in self._over}
            self._due = {one.id: self._due.get(one.id, now + one.template.ttl / 3) for one in live} | over
            self._over.clear()
            await self._each([one for one in live if self._due[one.id] <= now], self._renew_one)
            next_due = min(self._due.values(), default=now + LONGEST_WAIT) - self._clock.now()
            await wait_at_most(self._renew, max(0.0, next_due) if known is not None else RETRY_RENEWAL)
            if known is None or self._renew.is_set():
                self._renew.clear()
                known = await self._leased()

    async def _leased(self) -> list[Replica] | None:
        """The replicas that hold a lease, after recording who will lose it; None if the state cannot be read now."""

        def note(connection: Connection) -> list[Replica]:
            changed = [after for one in store.leased(connection) if (after := self._noted(one)) is not one]
            store.save_replicas(connection, changed)
            return changed

        try:
            live = await self._store.read(store.leased)
        except errors.GpuscaleError as error:
            _log.warning("cannot read which leases to renew", error=error.message)
            return None
        try:
            news = any(self._noted(one) is not one for one in live)
            changed = await self._store.write(note, frees=True) if news else []
        except errors.GpuscaleError as error:
            _log.warning("cannot record planned revocations", error=error.message)
            asyncio.get_running_loop().call_later(RETRY_RENEWAL, self._renew.set)
            return live
        for one in changed:
            name, why = replica_name(one.endpoint, one.id), one.revocation
            if why is None:
                _log.info("a replica may keep its GPUs", replica=name)
            else:
                _log.info(
                    "a replica will lose its GPUs", replica=name, at=f"{why.time:%FT%TZ}", why=why.reason
                )
        self._wakes.call_each({one.endpoint for one in changed})  # they find replacements
        return live

    def _noted(self, replica: Replica) -> Replica:
        """The replica with the allocator's last word on its lease; the same one if nothing is new."""
        if self._revoked is None or replica.lease is None:
            return replica
        at, time, reason = self._revoked.get(replica.lease.reservation, (None, NEVER, ""))
        return revoked(replica, at, time, reason, self._clock.now())

    async def follow_revocations(self) -> None:
        """Follow revocations, across broken streams and restarts of the allocator."""
        async for problem in endings(self._follow, RETRY):
            if self._following:
                _log.warning("cannot follow revocations", error=problem)
            self._following = False

    async def _follow(self, backoff: Backoff) -> None:
        found: dict[str, tuple[float, datetime, str]] = {}
        with rpc_errors():
            async for message in self._reservations.revoked():
                backoff.reset()
                for one in message.reservations:
                    # The writer thread reads it meanwhile: no current revocation may be missing, even briefly.
                    if one.HasField("revoke_time"):
                        # Both times are by the allocator's clock, and what remains is as of its answer.
                        time = to_datetime(one.revoke_time)
                        early = (to_datetime(one.expire_time) - time).total_seconds()
                        at = self._clock.now() + seconds(one.remaining) - early
                        found[one.name] = at, time, one.end_reason
                        continue
                    found.pop(one.name, None)
                    if not one.HasField("remaining"):
                        self._over.add(one.name)  # a renewal shows whether that is a loss
                for name in message.removed:
                    found.pop(name, None)
                if message.full or self._following:
                    self._revoked, self._following = found, True
                    self._renew.set()

    async def _renew_one(self, replica: Replica, lease: ReplicaLease) -> None:
        try:
            try:
                await self._reservations.renew(lease)
            except (errors.NotFoundError, errors.FailedPreconditionError) as error:
                if not await self._reservations.holds(lease):
                    await self._note_loss(replica, error.message)
            wait = replica.template.ttl / 3
        except errors.GpuscaleError as error:
            _log.warning("a lease was not renewed", replica=replica.id, error=error.message)
            wait = min(RETRY_RENEWAL, replica.template.ttl / 10)
        self._due[replica.id] = self._clock.now() + wait

    async def _note_loss(self, replica: Replica, message: str) -> None:
        """Its GPUs may have been granted to others: stop it at once."""
        at = Moment(self._clock.now(), self._clock.wall())
        planned = replica.revocation is not None and replica.revocation.at - SAME_MOMENT <= at.now
        reason = f"lost its reservation: {message}"

        def stop(connection: Connection) -> bool:
            one = store.replica(connection, replica.id)
            if one is None or one.ended:
                return False
            why = EndReason.REVOKED if planned else EndReason.LEASE_LOST
            store.save_replica(connection, asked_to_stop(one, reason, at, why=why, hurry=True))
            return True

        if not await self._store.write(stop, frees=True):
            return self._renew.set()  # it has ended meanwhile, and its reservation was released
        name = replica_name(replica.endpoint, replica.id)
        if planned:
            _log.info("a replica was still running when its GPUs were revoked", replica=name, why=message)
        else:
            _log.error("a replica lost its GPUs", replica=name, error=message)
        await self._hub.refresh([replica.adapter])
        self._wakes.call(replica.endpoint)
        return None

    async def release_forever(self) -> None:
        """Release the reservation of every ended replica, until the allocator has acknowledged it."""
        backoff = Backoff(initial=0.5, cap=10.0)
        while True:
            self._release.clear()
            try:
                await self._each(await self._store.read(store.owing), self._release_one)
                settled = not await self._store.read(store.owing)
            except errors.GpuscaleError as error:
                _log.warning("cannot read which leases to release", error=error.message)
                settled = False
            if settled:
                backoff.reset()
            await wait_at_most(self._release, LONGEST_WAIT if settled else backoff.next())

    async def _release_one(self, replica: Replica, lease: ReplicaLease) -> None:
        def settle(connection: Connection) -> None:
            one = store.replica(connection, replica.id)
            if one is not None:
                store.save_replica(connection, replace(one, owes_release=False))

        try:
            await hit_async("autoscaler.replica.before_release")
            with suppress(
                errors.NotFoundError, errors.FailedPreconditionError
            ):  # then nothing of ours is left
                await self._reservations.release(lease)
            await hit_async("autoscaler.replica.after_release")
            await self._store.write(settle, frees=True)
        except errors.GpuscaleError as error:
            _log.warning("a reservation was not released", reservation=lease.reservation, error=error.message)
        else:
            self._renew.set()  # it may be one that is still renewed
            self._wakes.call(replica.endpoint)
            self._wakes.call_waiting()

    async def _each(
        self, replicas: Iterable[Replica], work: Callable[[Replica, ReplicaLease], Awaitable[None]]
    ) -> None:
        limit = asyncio.Semaphore(CONCURRENT)

        async def bounded(replica: Replica, lease: ReplicaLease) -> None:
            async with limit:
                await work(replica, lease)

        async with asyncio.TaskGroup() as group:
            for replica in replicas:
                if replica.lease is not None:
                    group.create_task(bounded(replica, replica.lease), name=f"lease of {replica.id}")
