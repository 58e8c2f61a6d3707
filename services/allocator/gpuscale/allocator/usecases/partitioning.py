"""Repartitioning idle GPUs: gpuscale-power gives them other MIG instances, if the operator of the host allows it.

An order is written to disk, then its GPU is cordoned, and the agent gets the order only if nobody holds a part of the GPU. The
cordon is lifted once the fleet reports the instances that the helper reported, whether it could make the ordered ones or not:
nothing is placed on an instance that is gone. Lifting the cordon earlier cancels the order.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from uuid import uuid4

from pydantic import TypeAdapter
from pydantic_core import to_json

from gpuscale.allocator.domain.cordons import Spot
from gpuscale.allocator.placing.partitions import Partition
from gpuscale.allocator.state.policies import Declaration, PowerChange
from gpuscale.allocator.usecases.draining import Maintenance
from gpuscale.allocator.usecases.powering import HEARD, Powering
from gpuscale.api.allocator import v1 as api
from gpuscale.common.errors import FailedPreconditionError, GpuscaleError
from gpuscale.common.names import node_name, reservation_name, to_id
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.security.auth import LOCAL

_KIND, _AUTHOR = "partitions", "gpuscale-power"
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class OrderedPartition:
    """The profiles of all instances that a GPU should have, and for whom."""

    id: str
    node: str
    uuid: str
    profiles: tuple[str, ...]
    wanted_by: str

    @property
    def spot(self) -> Spot:
        """The GPU."""
        return Spot(self.node, to_id(self.uuid))


_TO_ORDER = TypeAdapter(OrderedPartition)


@dataclass(eq=False)
class Partitioning:
    """Has GPUs partitioned. Call `load` first."""

    maintenance: Maintenance
    powering: Powering
    _orders: dict[str, OrderedPartition] = field(default_factory=dict[str, OrderedPartition], init=False)
    _handed: set[str] = field(default_factory=set[str], init=False)
    _ended: dict[str, str] = field(default_factory=dict[str, str], init=False)
    """The problem, or none, of orders whose cordon is lifted and that are still on disk."""
    _told: dict[str, tuple[float, Mapping[str, api.PartitionEnd] | None]] = field(
        default_factory=dict[str, tuple[float, Mapping[str, api.PartitionEnd] | None]], init=False
    )

    async def load(self) -> None:
        """Load what is on disk."""
        for one in await self.powering.store.declared(_KIND):
            self._orders[one.id] = _TO_ORDER.validate_json(one.body)

    def take(self, node: str, ends: Mapping[str, api.PartitionEnd] | None) -> Sequence[OrderedPartition]:
        """Record how orders on a node ended (None if its helper may not partition); returns the orders to carry out."""
        self._told[node] = self.maintenance.clock.now(), ends
        return [self._orders[one] for one in self._handed if self._orders[one].node == node]

    @property
    def under_way(self) -> str:
        """The names of the GPUs that are being partitioned, in words."""
        return ", ".join(one.spot.name for one in self._orders.values())

    def allows(self, node: str) -> bool:
        """Whether a node's helper may partition GPUs, or is doing so: it does not report meanwhile."""
        if any(one.node == node for one in self._orders.values()):
            return True
        heard, ends = self._told.get(node, (-HEARD, None))
        return ends is not None and self.maintenance.clock.now() - heard < HEARD

    async def begin(self, partitions: Iterable[Partition], wanted_by: str) -> None:
        """Order other instances for idle GPUs.

        Raises FailedPreconditionError: NO_PARTITION_HELPER; MOVES_UNDER_WAY: others are being partitioned.
        """
        clock = self.maintenance.clock
        if gpus := self.under_way:
            raise FailedPreconditionError(
                f"being partitioned: {gpus}; wait, or uncordon that to give it up", reason="MOVES_UNDER_WAY"
            )
        for part in partitions:
            if not self.allows(part.node):
                raise FailedPreconditionError(
                    f"{node_name(part.node)} has no gpuscale-power that may partition GPUs: start it there with"
                    " --partitions-file, or type there what gpuscalectl plan rebalance says",
                    reason="NO_PARTITION_HELPER",
                    metadata={"name": node_name(part.node)},
                )
            order = OrderedPartition(uuid4().hex, part.node, part.gpu.uuid, part.profiles, wanted_by)
            body, wall = to_json(order).decode(), clock.wall().timestamp()
            await self.powering.store.declare(_KIND, Declaration(order.id, body, "", wall, "", ""))
            reason = f"gets MIG instances {', '.join(order.profiles)} for {wanted_by}"
            await self.maintenance.cordon(order.spot, reason=reason, author=_AUTHOR)
            self._orders[order.id] = order

    async def look(self) -> None:
        """Hand out orders, and close those that have ended. Call it again and again."""
        for order in [*self._orders.values()]:
            try:
                cordon = self.maintenance.cordons.get(order.spot)
                if cordon is None or cordon.author != _AUTHOR:
                    problem = self._ended.get(order.id, "its cordon was lifted, or is somebody else's")
                    await self._end(order, problem, lift=False)
                elif order.id not in self._handed:
                    if holders := self.maintenance.holders(order.spot):
                        await self._end(
                            order, f"{reservation_name(holders[0].id)} holds a part of it", lift=True
                        )
                    else:
                        self._handed.add(order.id)
                else:
                    end = (self._told.get(order.node, (0.0, None))[1] or {}).get(order.id)
                    node = self.maintenance.view.get(order.node)
                    if end is None or node is None:
                        continue
                    if end.unsettled:  # it may have been left half done
                        problem = f"{end.problem}. It stays cordoned: look at it, then uncordon it"
                        await self._end(order, problem, lift=False)
                    elif {*end.instances} == {gpu.uuid for gpu in node.gpus if gpu.parent == order.uuid}:
                        await self._end(order, end.problem, lift=True)
            except GpuscaleError as error:
                _log.warning("cannot look after an order", gpu=order.spot.name, problem=error.message)

    async def _end(self, order: OrderedPartition, problem: str, *, lift: bool) -> None:
        if lift:
            await self.maintenance.uncordon(order.spot, LOCAL)
            self._ended[order.id] = problem
        await self.powering.store.withdraw(_KIND, order.id)
        del self._orders[order.id]
        self._handed.discard(order.id)
        self._ended.pop(order.id, None)
        of, clock = ", ".join(order.profiles), self.maintenance.clock
        why = f"does not get MIG instances {of}: {problem}" if problem else f"has MIG instances {of}"
        why = f"{why} (for {order.wanted_by})"
        change = PowerChange(order.spot.name, None, None, "", why, clock.wall(), order.profiles)
        self.powering.record(change)
        _log.warning("an order to partition a GPU ended", gpu=order.spot.name, outcome=why)
