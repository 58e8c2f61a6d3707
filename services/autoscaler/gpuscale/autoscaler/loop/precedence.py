"""Who gives way when GPUs are short: asks the allocator which holders would help, and notifies their endpoints.

Kept in memory: after a restart, endpoints that lack GPUs ask again.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import grpc

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.autoscaler.domain.decisions import Code, Stage, Step
from gpuscale.autoscaler.domain.inputs import GiveWay
from gpuscale.autoscaler.domain.planning import nodes_of, victims
from gpuscale.autoscaler.domain.precedence import RECENT, Holder, NodeRoom, choose, hold, secure
from gpuscale.autoscaler.domain.replicas import Goal, Replica, ReplicaState
from gpuscale.autoscaler.domain.spec import Endpoint
from gpuscale.autoscaler.loop.hub import AdapterHub, Wakes
from gpuscale.autoscaler.state import store
from gpuscale.autoscaler.wire.specs import ask_to_wire
from gpuscale.common.errors import GpuscaleError
from gpuscale.common.names import endpoint_name
from gpuscale.common.rpc.channel import RPC_TIMEOUT
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import Clock
from gpuscale.common.store.store import Store

SETTLES = 60.0
"""Seconds after which an endpoint that still has no GPUs makes others give way again."""
RETRY = 5.0
"""Seconds until a replica that found no place is retried, unless something becomes free earlier."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StartRefusal:
    """Why the waiting replicas could not start, and seconds until a retry makes sense."""

    stage: Stage
    code: Code
    text: str
    retry_after: float = RETRY


@dataclass(slots=True)
class Given:
    """An endpoint's concession: its size, its end, its beneficiaries (by id), its replicas, and earlier ones."""

    times: list[float]
    most: int = 0
    until: float = 0.0
    to: dict[str, str] = field(default_factory=dict[str, str])
    replicas: set[str] = field(default_factory=set[str])

    def holds(self, now: float) -> None:
        """Give way from now on, for as long as earlier concessions require."""
        self.until = now + hold(self.times, now)

    def way(self, now: float) -> GiveWay | None:
        """How it gives way; None if it no longer does."""
        if self.until <= now:
            return None
        return GiveWay(self.most, ", ".join(sorted(self.to.values())), tuple(sorted(self.replicas)))


@dataclass(slots=True)
class _Claim:
    """Since when an endpoint lacks GPUs; its replicas for which others give way, and until when it waits."""

    since: float
    paid: dict[str, tuple[frozenset[str], float]] = field(
        default_factory=dict[str, tuple[frozenset[str], float]]
    )

    def settle(self, lacking: Collection[str], running: AbstractSet[str], now: float) -> None:
        """Those that give way may take their time; what is then not granted soon is claimed again."""
        paid = {one: self.paid[one] for one in lacking if one in self.paid}
        until = {one: now + SETTLES if victims & running else end for one, (victims, end) in paid.items()}
        self.paid = {one: (paid[one][0], end) for one, end in until.items() if end > now}


class Precedence:
    """Endpoints that give way, or did (`given`, by id); `busy` tells how busy the replicas of an endpoint are."""

    def __init__(
        self,
        state: Store,
        clock: Clock,
        hub: AdapterHub,
        allocator: grpc.aio.Channel,
        wakes: Wakes,
        busy: Callable[[Endpoint], Mapping[str, float]],
    ) -> None:
        self._store = state
        self._clock = clock
        self._hub = hub
        self._capacity = allocator_api.CapacityServiceStub(allocator)
        self._wakes = wakes
        self._busy = busy
        self.given: dict[str, Given] = {}
        self._claims: dict[str, _Claim] = {}
        self._claiming = asyncio.Lock()

    async def claim(
        self, endpoint: Endpoint, refusal: StartRefusal | None, replicas: Sequence[Replica]
    ) -> list[Step]:
        """Have others give way to an endpoint's replicas that lack GPUs, if it is time; returns steps that say so."""
        lacking = [one for one in replicas if one.state is ReplicaState.PENDING and one.goal is Goal.RUN]
        short = refusal is not None and refusal.code is Code.NO_CAPACITY and lacking
        if endpoint.spec.priority is None or not short:
            self._claims.pop(endpoint.id, None)
            return []
        now = self._clock.now()
        claim = self._claims.setdefault(endpoint.id, _Claim(now))
        if now - claim.since < endpoint.spec.preempt_after:
            return []
        for given in self.given.values():
            if endpoint.id in given.to and given.until > now:
                given.holds(now)
        try:
            async with self._claiming:
                await self._claim(endpoint, claim, lacking)
        except GpuscaleError as error:
            _log.warning("cannot find out who could give way", endpoint=endpoint.id, error=error.message)
        steps, now = list[Step](), self._clock.now()
        for id_, given in sorted(self.given.items()):
            if endpoint.id in given.to and given.until > now:
                names = ", ".join(sorted(given.replicas))
                text = f"{endpoint_name(id_)} gives way, and keeps {given.most}: {names} finish and stop"
                steps.append(Step(Stage.GPU, Code.PREEMPTS, endpoint.desired, endpoint.desired, text))
        return steps

    async def _claim(self, endpoint: Endpoint, claim: _Claim, lacking: Sequence[Replica]) -> None:
        template = lacking[0].template
        alike = [one.id for one in lacking if one.template == template]
        others, rows = await self._store.read(
            lambda c: (store.endpoints(c), [*store.replicas(c), *store.owing(c)])
        )
        now = self._clock.now()
        named = {one for given in self.given.values() if given.until > now for one in given.replicas}
        claim.settle(alike, {one.id for one in rows}, now)
        coming = [one for one in rows if one.goal is Goal.STOP or one.ended or one.id in named]
        staying = [one for one in rows if one not in coming]
        holders = dict[str, Holder]()  # who may give way, by reservation
        spare = dict[str, int]()  # how many of each endpoint
        for other in others:
            own = secure([row for row in staying if row.endpoint == other.id])
            priority, least = other.spec.priority or 0, other.spec.min_replicas
            if own and other.spec.gives_way and priority < (endpoint.spec.priority or 0):
                spare[other.id] = len(own) - least
                for rank, row in enumerate(victims(own, other.spec, self._busy(other))):
                    if row.lease is not None and self._hub.live(row.adapter):
                        holders[row.lease.reservation] = Holder(other.id, row.id, priority, rank, least)
        nodes = nodes_of(template, self._hub.facts())
        if not holders or not nodes:
            return
        request = allocator_api.ExplainPlacementRequest(ask=ask_to_wire(template, nodes))
        with rpc_errors():
            explained = await self._capacity.ExplainPlacement(request, timeout=RPC_TIMEOUT)
        now = self._clock.now()  # the answer may have taken long
        held = allocator_api.Obstacle.OBSTACLE_HELD
        rooms = [  # if the holders left
            NodeRoom(
                node.fitting_count,
                tuple(frozenset(gpu.reservations) for gpu in node.gpus if gpu.obstacle == held),
            )
            for node in explained.nodes
            if not node.obstacle
        ]
        chosen = choose(
            template.gpu_count,
            rooms,
            {one.lease.reservation for one in coming if one.lease is not None},
            holders,
            spare,
            counted=len(claim.paid),
            more=len(alike) - len(claim.paid),
        )
        unpaid = (one for one in alike if one not in claim.paid)
        for whom, reservations in zip(list(unpaid), chosen, strict=False):
            leaving = [holders[one] for one in reservations]
            claim.paid[whom] = frozenset(one.replica for one in leaving), now + SETTLES
            for one in leaving:
                spare[one.endpoint] -= 1
                given = self.given.get(one.endpoint)
                if given is None or given.until <= now:
                    recent = [] if given is None else [at for at in given.times if at > now - RECENT]
                    given = self.given[one.endpoint] = Given([*recent, now])
                given.most = spare[one.endpoint] + one.least
                given.to[endpoint.id] = f"{endpoint_name(endpoint.id)} (priority {endpoint.spec.priority})"
                given.replicas.add(one.replica)
                given.holds(now)
        for id_ in sorted({holders[one].endpoint for one in frozenset[str]().union(*chosen)}):
            _log.info("an endpoint gives way", endpoint=id_, to=endpoint.id)
            self._wakes.call(id_, evaluate=True, changed=False)
