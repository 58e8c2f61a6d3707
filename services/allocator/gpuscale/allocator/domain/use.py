"""Use: what live reservations hold of each GPU and of each node. Pure.

The ledger keeps it; placement reads it. A GPU that is held whole admits nobody; of a shared one the shares and the
memory held add up.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gpuscale.allocator.domain.model import WHOLE, Gpu, Reservation, ReservedGpu


@dataclass(slots=True)
class GpuUse:
    """What is held of a GPU: thousandths of it, bytes of its memory, and by which reservations.

    `unsized` counts the parts of reservations that do not say how much of its memory they hold: each holds all of it.
    A GPU that is held whole has `milli` of WHOLE.
    """

    milli: int = 0
    claimed_bytes: int = 0
    unsized: int = 0
    reservations: tuple[str, ...] = ()


@dataclass(slots=True)
class NodeUse:
    """What is held of a node: CPU in thousandths of a core, bytes of main memory, and by which reservations."""

    cpu_milli: int = 0
    memory_bytes: int = 0
    reservations: tuple[str, ...] = ()


FREE_GPU = GpuUse()
FREE_NODE = NodeUse()


class Use:
    """What all live reservations hold.

    A MIG instance and its GPU are never there at once, but a lease may outlive the one of which it is: until it ends, `on`
    takes the other for held. Each change notes what it touched, for an index that follows (`changed`).
    """

    def __init__(self) -> None:
        self._gpus: dict[str, GpuUse] = {}
        self._nodes: dict[str, NodeUse] = {}
        self._live: dict[str, Reservation] = {}
        self._instances: dict[str, set[str]] = {}
        self._tenants: dict[str, int] = {}
        self._changed: defaultdict[str, set[str]] = defaultdict(set)

    def __contains__(self, uuid: object) -> bool:
        """Whether anything of the GPU with this UUID is held."""
        return uuid in self._gpus

    def __len__(self) -> int:
        """Of how many GPUs anything is held."""
        return len(self._gpus)

    def gpu(self, uuid: str) -> GpuUse:
        """What is held of a GPU."""
        return self._gpus.get(uuid, FREE_GPU)

    def on(self, gpu: Gpu) -> GpuUse:
        """What is held of a GPU: all of it while the GPU whose MIG instance it is is held, or an instance of it."""
        use = self.gpu(gpu.uuid)
        if not gpu.parent and gpu.uuid not in self._instances:
            return use
        kin = [self.gpu(one) for one in (gpu.parent, *sorted(self._instances.get(gpu.uuid, ())))]
        if not any(one.milli for one in kin):
            return use
        names = [name for one in (use, *kin) for name in one.reservations]
        return GpuUse(WHOLE, use.claimed_bytes, use.unsized, tuple(dict.fromkeys(names)))

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
        """The nodes whose use has changed since the last call, and the GPUs of them; with an instance, its GPU."""
        changed, self._changed = self._changed, defaultdict(set)
        return changed

    def refuse(self, gpus: tuple[ReservedGpu, ...]) -> None:
        """Check that the GPUs can be held beside what is held already.

        Raises:
            ValueError: one of them is held whole, is to be held whole and is not free, or its shares exceed it.
        """
        asked: dict[str, int] = {}
        for gpu in gpus:
            asked[gpu.uuid] = milli = asked.get(gpu.uuid, self.gpu(gpu.uuid).milli) + gpu.milli
            if milli > WHOLE:
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
        milli = 0
        members: set[tuple[str, int]] = set()
        for gpu in reservation.gpus:
            milli += gpu.milli
            members.add((gpu.node, gpu.member))
            self._changed[gpu.node].add(gpu.uuid)
            use, claimed = self._gpus.get(gpu.uuid, FREE_GPU), gpu.memory_bytes or 0
            if names := _names(use.reservations, reservation.id, sign):
                self._gpus[gpu.uuid] = GpuUse(
                    use.milli + sign * gpu.milli,
                    use.claimed_bytes + sign * claimed,
                    use.unsized + (0 if claimed else sign),
                    names,
                )
            else:
                self._gpus.pop(gpu.uuid, None)
            if gpu.parent:
                self._changed[gpu.node].add(gpu.parent)
                self._note_instance(gpu)
        for node, _ in members:
            self._add_node(node, reservation, sign)
        held = self._tenants.get(reservation.tenant, 0) + sign * milli
        self._tenants[reservation.tenant] = held
        if not held:
            del self._tenants[reservation.tenant]

    def _note_instance(self, gpu: ReservedGpu) -> None:
        held = self._instances.setdefault(gpu.parent, set())
        if gpu.uuid in self._gpus:
            held.add(gpu.uuid)
        else:
            held.discard(gpu.uuid)
            if not held:
                del self._instances[gpu.parent]

    def _add_node(self, node: str, reservation: Reservation, sign: int) -> None:
        use = self._nodes.get(node, FREE_NODE)
        if names := _names(use.reservations, reservation.id, sign):
            self._nodes[node] = NodeUse(
                use.cpu_milli + sign * reservation.cpu_milli,
                use.memory_bytes + sign * reservation.host_memory_bytes,
                names,
            )
        else:
            self._nodes.pop(node, None)


def _names(names: tuple[str, ...], name: str, sign: int) -> tuple[str, ...]:
    """The names with one more, or without it, each once: what is there of a reservation that comes is the last."""
    if sign > 0:
        return names if names and names[-1] == name else (*names, name)
    if name not in names:
        return names
    at = names.index(name)
    return names[:at] + names[at + 1 :]
