"""Use: what live reservations hold of each GPU and of each node. Pure.

The ledger keeps it; placement reads it. A GPU that is held whole admits nobody; of a shared one the shares and the
memory held add up.
"""

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType

from gpuscale.allocator.model import WHOLE, Reservation, ReservedGpu
from gpuscale.allocator.values import value


@value(frozen=True, slots=True)
class GpuUse:
    """What is held of a GPU: thousandths of it, bytes of its memory, and by which reservations.

    `unsized` counts the parts of reservations that do not say how much of its memory they hold: each holds all of it.
    A GPU that is held whole has `milli` of WHOLE.
    """

    milli: int = 0
    claimed_bytes: int = 0
    unsized: int = 0
    reservations: tuple[str, ...] = ()


@value(frozen=True, slots=True)
class NodeUse:
    """What is held of a node: CPU in thousandths of a core, bytes of main memory, and by which reservations."""

    cpu_milli: int = 0
    memory_bytes: int = 0
    reservations: tuple[str, ...] = ()


FREE_GPU = GpuUse()
FREE_NODE = NodeUse()


class Use:
    """What all live reservations hold.

    Each change notes what it touched, for an index that follows (`changed`).
    """

    def __init__(self) -> None:
        self._gpus: dict[str, GpuUse] = {}
        self._nodes: dict[str, NodeUse] = {}
        self._live: dict[str, Reservation] = {}
        self._tenants: dict[str, int] = {}
        self._changed: dict[str, set[str]] = {}

    def __contains__(self, uuid: object) -> bool:
        """Whether anything of the GPU with this UUID is held."""
        return uuid in self._gpus

    def __len__(self) -> int:
        """Of how many GPUs anything is held."""
        return len(self._gpus)

    def gpu(self, uuid: str) -> GpuUse:
        """What is held of a GPU."""
        return self._gpus.get(uuid, FREE_GPU)

    def node(self, node: str) -> NodeUse:
        """What is held of a node."""
        return self._nodes.get(node, FREE_NODE)

    @property
    def tenants(self) -> Mapping[str, int]:
        """Thousandths of GPUs by the tenants that hold any."""
        return MappingProxyType(self._tenants)

    def live(self, reservation_id: str) -> Reservation:
        """The reservation with this id, as it was when it was held. Raises KeyError if it holds nothing."""
        return self._live[reservation_id]

    def reservations(self, node: str) -> Iterator[Reservation]:
        """The live reservations on a node."""
        return (self._live[reservation] for reservation in self.node(node).reservations)

    def fence(self, reservation_id: str) -> int | None:
        """The fence of a live reservation; None of any other."""
        found = self._live.get(reservation_id)
        return None if found is None else found.fence

    def changed(self) -> Mapping[str, Collection[str]]:
        """The nodes whose use has changed since the last call, and the GPUs of them."""
        changed, self._changed = self._changed, {}
        return changed

    def refuse(self, gpus: tuple[ReservedGpu, ...]) -> None:
        """Check that the GPUs can be held beside what is held already.

        Raises:
            ValueError: one of them is held whole, is to be held whole and is not free, or its shares exceed it.
        """
        asked: dict[str, int] = {}
        for gpu in gpus:
            asked[gpu.uuid] = asked.get(gpu.uuid, 0) + gpu.milli
            if self.gpu(gpu.uuid).milli + asked[gpu.uuid] > WHOLE:
                raise ValueError(
                    f"GPU {gpu.uuid} is held already by {', '.join(self.gpu(gpu.uuid).reservations)}"
                )

    def hold(self, reservation: Reservation) -> None:
        """Add what a reservation holds.

        Raises:
            ValueError: as `refuse`.
        """
        self.refuse(reservation.gpus)
        self._live[reservation.id] = reservation
        self._add(reservation, 1)

    def free(self, reservation_id: str) -> None:
        """Take away what a reservation holds; nothing if it holds nothing."""
        reservation = self._live.pop(reservation_id, None)
        if reservation is not None:
            self._add(reservation, -1)

    def _add(self, reservation: Reservation, sign: int) -> None:
        for gpu in reservation.gpus:
            use = self.gpu(gpu.uuid)
            self._changed.setdefault(gpu.node, set()).add(gpu.uuid)
            claimed = gpu.memory_bytes or 0
            self._put_gpu(
                gpu.uuid,
                GpuUse(
                    use.milli + sign * gpu.milli,
                    use.claimed_bytes + sign * claimed,
                    use.unsized + (0 if claimed else sign),
                    _names(use.reservations, reservation.id, sign),
                ),
            )
        for node, _ in {(gpu.node, gpu.member): None for gpu in reservation.gpus}:
            self._add_node(node, reservation, sign)
        milli = sum([gpu.milli for gpu in reservation.gpus])
        held = self._tenants.get(reservation.tenant, 0) + sign * milli
        self._tenants[reservation.tenant] = held
        if not held:
            del self._tenants[reservation.tenant]

    def _add_node(self, node: str, reservation: Reservation, sign: int) -> None:
        use = self.node(node)
        changed = NodeUse(
            use.cpu_milli + sign * reservation.cpu_milli,
            use.memory_bytes + sign * reservation.host_memory_bytes,
            _names(use.reservations, reservation.id, sign),
        )
        if changed.reservations:
            self._nodes[node] = changed
        else:
            self._nodes.pop(node, None)

    def _put_gpu(self, uuid: str, use: GpuUse) -> None:
        if use.reservations:
            self._gpus[uuid] = use
        else:
            self._gpus.pop(uuid, None)


def _names(names: tuple[str, ...], name: str, sign: int) -> tuple[str, ...]:
    """The names with one more, or without it, each once."""
    if sign > 0:
        return names if name in names else (*names, name)
    return tuple([one for one in names if one != name])
