"""Cordons: nodes and GPUs that take no new reservations, and the deadline for those they have. Pure.

A node and one of its GPUs can be cordoned independently. Deadlines are seconds of CLOCK_BOOTTIME.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime

from gpuscale.allocator.domain.model import IS_DRAINED
from gpuscale.common import names
from gpuscale.common.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Spot:
    """A node, or one of its GPUs: `gpu` is the UUID in lower case, and empty for the node."""

    node: str
    gpu: str = ""

    @property
    def name(self) -> str:
        """`nodes/{node}` or `nodes/{node}/gpus/{gpu}`."""
        return names.gpu_name(self.node, self.gpu) if self.gpu else names.node_name(self.node)

    def holds(self, node: str, uuid: str, parent: str = "") -> bool:
        """Whether this spot covers a GPU; for a MIG instance `parent` is the UUID of its GPU."""
        return node == self.node and self.gpu in {"", names.to_id(uuid), parent and names.to_id(parent)}


@dataclass(frozen=True, slots=True)
class Cordon:
    """Nothing new is placed on the spot; `reason` and `author` come from whoever set it.

    A drain ends what is there at `deadline`, `grace` seconds after it was requested; both are None for a plain cordon.
    """

    spot: Spot
    reason: str
    author: str
    created: datetime
    deadline: float | None = None
    grace: float | None = None

    @property
    def why(self) -> str:
        """What holders are told."""
        return f"{self._mark}: {self.reason}" if self.reason else self._mark

    def told(self, why: str) -> bool:
        """Whether a holder was told this on behalf of this spot, whatever its reason at the time."""
        return why == self._mark or why.startswith(f"{self._mark}: ")

    @property
    def _mark(self) -> str:
        return f"{self.spot.name}{IS_DRAINED}"


def spot_of(name: str) -> Spot:
    """Parse the name of a node, GPU or cordon; InvalidArgumentError if it is none of these."""
    target = names.cordoned(name)
    ids = names.match(names.NODE, target) or names.match(names.GPU, target)
    if ids is None:
        raise InvalidArgumentError(f"name must look like {names.NODE} or {names.GPU}", field="name")
    return Spot(ids["node"], ids.get("gpu", ""))


def cordoned(before: Cordon | None, asked: Cordon) -> Cordon:
    """The cordon after a request for one where one may already exist.

    It keeps the time of the first request, and the old reason if the new one is empty. A cordon does not stop a drain; of two
    drains the earlier deadline holds, so that repeating a request never extends it.
    """
    if before is None:
        return asked
    if before.deadline is not None and asked.deadline is None:
        return before
    sooner = min((before, asked), key=lambda one: float("inf") if one.deadline is None else one.deadline)
    return replace(
        asked,
        created=before.created,
        reason=asked.reason or before.reason,
        deadline=sooner.deadline,
        grace=sooner.grace,
    )


def rebased(cordon: Cordon, now: float) -> Cordon:
    """A cordon of an earlier boot: nobody watched its clock, so its full grace starts again."""
    return replace(cordon, deadline=None if cordon.grace is None else now + cordon.grace)


class Cordons:
    """All cordons."""

    def __init__(self, cordons: Iterable[Cordon] = ()) -> None:
        self._by_spot = {cordon.spot: cordon for cordon in cordons}

    def __iter__(self) -> Iterator[Cordon]:
        """By name."""
        return iter(sorted(self._by_spot.values(), key=lambda cordon: cordon.spot.name))

    def get(self, spot: Spot) -> Cordon | None:
        """The cordon of exactly this node or GPU."""
        return self._by_spot.get(spot)

    def put(self, cordon: Cordon) -> None:
        """Add or replace a cordon."""
        self._by_spot[cordon.spot] = cordon

    def remove(self, spot: Spot) -> None:
        """Lift a cordon, if there is one."""
        self._by_spot.pop(spot, None)

    def covering(self, node: str, uuid: str = "", parent: str = "") -> Cordon | None:
        """The cordon that keeps new work off a GPU: its node's, its own, or its parent's for a MIG instance."""
        if not self._by_spot:
            return None
        spots = [Spot(node), *(Spot(node, names.to_id(one)) for one in (uuid, parent) if one)]
        return next((self._by_spot[spot] for spot in spots if spot in self._by_spot), None)

    def marks(self) -> frozenset[str]:
        """What is cordoned, for placement: `nodes/{node}` for nodes, ids for GPUs."""
        return frozenset(spot.gpu or spot.name for spot in self._by_spot)
