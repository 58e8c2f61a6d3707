"""Whether an ask can be served at all, by trying every placement there is. Slow and plain; for a few GPUs."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from gpuscale.allocator.domain import model
from gpuscale.allocator.placing.constraints import memory_on, milli_on
from tests.support.allocator_values import NOW, reserved
from tests.support.placing import NOTHING, free_memory, obstacle, reservation

PETABYTE = 10**15


class TooManyError(Exception):
    """There are more placements than anybody would try."""


class Oracle:
    """All placements of an ask on these nodes, beside what is held in `use`; what is tried is taken back."""

    def __init__(
        self, nodes: Sequence[model.Node], use: model.Use, cordons: frozenset[str] = NOTHING
    ) -> None:
        self._nodes = nodes
        self._use = use
        self._cordons = cordons
        self._left = 2000

    def node_counts(self, ask: model.Ask) -> set[int]:
        """On how many nodes the members can lie; empty where they cannot be placed."""
        self._seen: set[object] = set()
        return set(self._placements(ask, ()))

    def _placements(self, ask: model.Ask, taken: tuple[str, ...]) -> Iterator[int]:
        self._left -= 1
        if self._left < 0:
            raise TooManyError
        if len(taken) == ask.member_count:
            yield len(set(taken))
            return
        state = (tuple(sorted(taken)), *(self._use.gpu(gpu.uuid).milli for gpu in self._gpus()))
        if state in self._seen:
            return
        self._seen.add(state)
        for node in self._nodes:
            if not _admits(ask.gang_strategy, taken, node.id):
                continue
            for gpus in combinations(self._fitting(node, ask), ask.gpu_count):
                name = f"tried {len(taken)}"
                held = [self._taken(node, one, ask, len(taken)) for one in gpus]
                self._use.hold(reservation(held, name=name, ask=ask, fence=-1))
                try:
                    yield from self._placements(ask, (*taken, node.id))
                finally:
                    self._use.free(name)

    def _gpus(self) -> Iterator[model.Gpu]:
        return (gpu for node in self._nodes for gpu in node.gpus)

    def _fitting(self, node: model.Node, ask: model.Ask) -> list[model.Gpu]:
        return [one for one in node.gpus if obstacle(node, one, self._use, ask, NOW, self._cordons) is None]

    def _taken(self, node: model.Node, one: model.Gpu, ask: model.Ask, member: int) -> model.ReservedGpu:
        total, free = one.memory_total_bytes, free_memory(one, self._use)
        held = reserved(one.uuid, node=node.id, milli=milli_on(ask, total))
        memory = memory_on(ask, total, free, model.WHOLE - self._use.gpu(one.uuid).milli)
        return replace(held, memory_bytes=memory, member=member, parent=one.parent)


def all_free(nodes: Sequence[model.Node]) -> list[model.Node]:
    """The nodes as they are at their best: idle, empty, in order; what they do not tell is plenty."""
    return [
        replace(
            node,
            state=model.NodeState.ONLINE,
            gpus=tuple(_free(gpu) for gpu in node.gpus),
            cpu_milli=PETABYTE if node.cpu_milli is None else node.cpu_milli,
            memory_total_bytes=PETABYTE if node.memory_total_bytes is None else node.memory_total_bytes,
        )
        for node in nodes
    ]


def _free(gpu: model.Gpu) -> model.Gpu:
    total = PETABYTE if gpu.memory_total_bytes is None else gpu.memory_total_bytes
    return replace(
        gpu,
        trouble="",
        quarantine="",
        fresh_until=NOW + 1,
        memory_total_bytes=total,
        memory_free_bytes=total,
        utilization_percent=0.0,
        processes=(),
    )


def _admits(strategy: model.GangStrategy, taken: tuple[str, ...], node: str) -> bool:
    """Whether a strategy lets the next member onto a node."""
    if strategy is model.GangStrategy.STRICT_PACK:
        return set(taken) <= {node}
    return strategy is not model.GangStrategy.STRICT_SPREAD or node not in taken
