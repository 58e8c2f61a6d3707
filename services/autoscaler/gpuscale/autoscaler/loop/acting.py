"""Brings pending replicas to life: reserve their GPUs, choose their adapter, write that down, and tell the adapter.

Every step may be the last one before a crash. The row says which nodes a Reserve was sent for until its answer is known;
whoever comes back sends the same request again, and gets what it was granted, or learns that it was granted nothing.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial

from gpuscale.autoscaler.domain.decisions import Code, Stage
from gpuscale.autoscaler.domain.planning import AdapterFacts, by_tier, candidates, nobody
from gpuscale.autoscaler.domain.replicas import (
    Goal,
    Moment,
    Replica,
    ReplicaLease,
    ReplicaState,
    assigned,
    ended,
)
from gpuscale.autoscaler.loop.hub import AdapterHub
from gpuscale.autoscaler.loop.leases import ReplicaGrant, Reservations
from gpuscale.autoscaler.state import store
from gpuscale.autoscaler.state.store import Connection
from gpuscale.common.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    GpuscaleError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
)
from gpuscale.common.runtime.tasks import Clock, hit_async
from gpuscale.common.store.store import Store

RETRY = 5.0
"""Seconds after which a replica that found no place is tried again, unless something becomes free earlier."""
AGAIN = 0.1
"""Seconds after which one is tried again that can get further now."""
MAX_NODES = 1_000
UNKNOWN_NODE_REST = 30.0
"""Seconds for which a node is not asked for that the allocator has never heard of."""

_NOTHING_RESERVED = (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
)

ENGINES_GPUS: tuple[str, ...] = ()
"""In place of nodes: adapters whose engine gives out GPUs itself."""

_NOT_HERE = frozenset({Code.NO_CAPACITY, Code.UNSATISFIABLE})
"""With these the next tier of adapters is tried."""


@dataclass(frozen=True, slots=True)
class StartRefusal:
    """Why the replicas that wait got no further, and seconds until it makes sense to try again."""

    stage: Stage
    code: Code
    text: str
    retry_after: float = RETRY


class Actor:
    """Acts on pending replicas, one after another.

    Args:
        store: the autoscaler's store.
        clock: what times are noted by.
        hub: the adapters.
        reservations: the allocator.
    """

    def __init__(self, store: Store, clock: Clock, hub: AdapterHub, reservations: Reservations) -> None:
        self._store = store
        self._clock = clock
        self._hub = hub
        self._reservations = reservations
        self._unknown_nodes: dict[str, float] = {}

    async def act(self, replicas: Iterable[Replica], tenant: str = "") -> StartRefusal | None:
        """Take the pending ones as far as they get; those whose Reserve has no answer yet come first.

        `tenant`: whose quota their GPUs count against; the autoscaler's own where it is empty.

        Raises:
            GpuscaleError: the state cannot be read or written.
        """
        pending = [one for one in replicas if one.state is ReplicaState.PENDING]
        told: set[str] = set()
        refused: dict[str, StartRefusal] = {}  # by capability set: one that waits for GPUs holds up no other
        try:
            for replica in sorted(pending, key=lambda one: not one.nodes):
                if replica.group.set in refused:
                    continue
                refusal = await self._act_on(replica, tenant, told)
                if refusal is not None:
                    refused[replica.group.set] = refusal
        finally:
            await self._hub.refresh(told)
        return next(iter(refused.values()), None)

    async def _act_on(self, replica: Replica, tenant: str, told: set[str]) -> StartRefusal | None:
        if replica.template.gpu_count == 0:
            return await self._assign(replica, None, told)
        tiers = [] if replica.goal is Goal.STOP else await self._nodes(replica)
        if not tiers and replica.goal is Goal.RUN:
            return self._nobody(replica)  # what an earlier life was granted waits until its adapter is back
        if replica.nodes or not tiers:
            return await self._reserve(replica, tenant, told)
        refusal = None
        for nodes in tiers:
            if nodes == ENGINES_GPUS:
                return await self._assign(replace(replica, nodes=()), None, told)
            replica = replace(replica, nodes=nodes)
            await self._save(replica)
            refusal = await self._reserve(replica, tenant, told)
            if refusal is None or refusal.code not in _NOT_HERE:
                break
        return refusal

    async def _reserve(self, replica: Replica, tenant: str, told: set[str]) -> StartRefusal | None:
        """Ask for its GPUs on its nodes, and use them."""
        await hit_async("autoscaler.replica.after_intent")
        try:
            grant = await self._reservations.reserve(replica, tenant)
        except ResourceExhaustedError as error:
            if error.reason != Code.NO_CAPACITY:  # the allocator is overloaded
                return _unavailable(error)
            return await self._refused(
                replica, StartRefusal(Stage.GPU, Code.NO_CAPACITY, error.message, _retry(error))
            )
        except AlreadyExistsError as error:
            await self._end(replica, f"its request for GPUs was taken: {error.message}")
            return None
        except _NOTHING_RESERVED as error:
            return await self._refused(replica, self._never(replica, error))
        except GpuscaleError as error:
            return _unavailable(error)
        await hit_async("autoscaler.replica.after_reserve")
        return await self._use(replica, grant, told)

    async def _use(self, replica: Replica, grant: ReplicaGrant | None, told: set[str]) -> StartRefusal | None:
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
        """Choose the adapter and write it down; it is told after that, as one of `told`."""
        work = partial(_assign, replica=replica, grant=grant, adapters=self._hub.facts(), at=self._moment())
        adapter = await self._store.write(work)
        if adapter is None:
            return self._nobody(replica)
        await hit_async("autoscaler.replica.after_record")
        told.add(adapter)
        return None

    async def _nodes(self, replica: Replica) -> list[tuple[str, ...]]:
        """Where it can have GPUs, tier by tier: nodes, without those that the allocator has just not known, or an engine."""
        now = self._clock.now()
        self._unknown_nodes = {node: until for node, until in self._unknown_nodes.items() if until > now}
        able = await self._store.read(partial(_able, replica=replica, adapters=self._hub.facts()))
        places: list[tuple[str, ...]] = []
        for tier in by_tier(replica.template, able):
            nodes = {one.node for one in tier if not one.capabilities.gives_gpus} - self._unknown_nodes.keys()
            if nodes:
                places.append(tuple(sorted(nodes)[:MAX_NODES]))
            if any(one.capabilities.gives_gpus for one in tier):
                places.append(ENGINES_GPUS)
        return places

    def _nobody(self, replica: Replica) -> StartRefusal:
        facts = [one for one in self._hub.facts() if one.node not in self._unknown_nodes]
        text = nobody(replica.template, facts, replica.group.asked.capabilities)
        if self._unknown_nodes:
            text += (
                f" (but for nodes that the allocator does not know: {', '.join(sorted(self._unknown_nodes))})"
            )
        return StartRefusal(Stage.ACT, Code.NO_ADAPTER, text)

    def _never(self, replica: Replica, error: GpuscaleError) -> StartRefusal:
        if isinstance(error, NotFoundError):
            named = error.metadata.get("nodes", "").replace(" and ", ", ").split(", ")
            until = self._clock.now() + UNKNOWN_NODE_REST
            self._unknown_nodes |= dict.fromkeys(set(named) & set(replica.nodes), until)
            if set(replica.nodes) - self._unknown_nodes.keys():
                return StartRefusal(Stage.GPU, Code.REFUSED, error.message, retry_after=AGAIN)
        code = Code.UNSATISFIABLE if error.reason == Code.UNSATISFIABLE else Code.REFUSED
        return StartRefusal(Stage.GPU, code, error.message, _retry(error))

    async def _refused(self, replica: Replica, refusal: StartRefusal) -> StartRefusal | None:
        """Nothing was reserved for it: it waits on, or is done if it should stop anyway."""
        if replica.goal is Goal.STOP:
            await self._end(replica, replica.reason)
            return None
        await self._save(replace(replica, nodes=()))
        return refusal

    async def _end(self, replica: Replica, reason: str) -> None:
        await self._save(ended(replica, ReplicaState.STOPPED, reason, self._moment()))

    async def _save(self, replica: Replica) -> None:
        await self._store.write(partial(store.save_replica, one=replica))

    def _moment(self) -> Moment:
        return Moment(self._clock.now(), self._clock.wall())


def _able(connection: Connection, replica: Replica, adapters: Collection[AdapterFacts]) -> list[AdapterFacts]:
    """The adapters that can run it, in the order in which they are tried."""
    loads = store.loads(connection)
    own = Counter(one.adapter for one in store.replicas(connection, replica.endpoint) if one.adapter)
    return candidates(replica.template, list(adapters), loads, own, replica.group.asked.capabilities)


def _assign(
    connection: Connection,
    replica: Replica,
    grant: ReplicaGrant | None,
    adapters: Collection[AdapterFacts],
    at: Moment,
) -> str | None:
    """Write the adapter with the fewest replicas (on the node of the GPUs); where none is left, the GPUs are owed back."""
    able = _able(connection, replica, adapters)
    chosen = next((one for one in able if _suits(one, replica, grant)), None)
    lease: ReplicaLease | None = grant.lease if grant else None
    if chosen is not None:
        node = grant.node if grant else chosen.node
        store.save_replica(connection, assigned(replica, chosen.id, node, lease))
    elif lease is not None:
        reason = "its adapter went away while its GPUs were reserved"
        gone = ended(replace(replica, lease=lease), ReplicaState.STOPPED, reason, at)
        store.save_replica(connection, gone)
    return chosen.id if chosen else None


def _suits(adapter: AdapterFacts, replica: Replica, grant: ReplicaGrant | None) -> bool:
    """Whether it has the very GPUs that were granted; without a grant, whether it needs none."""
    if grant is not None:
        return adapter.node == grant.node and not adapter.capabilities.gives_gpus
    return replica.template.gpu_count == 0 or adapter.capabilities.gives_gpus


def _unavailable(error: GpuscaleError) -> StartRefusal:
    text = f"the allocator does not answer: {error.message}"
    return StartRefusal(Stage.GPU, Code.ALLOCATOR_UNAVAILABLE, text, _retry(error))


def _retry(error: GpuscaleError) -> float:
    return RETRY if error.retry_after is None else min(max(error.retry_after, 0.2), RETRY)
