"""Survey: every node as one ask sees it, for saying what came nearest and what stood in the way. Pure."""

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass

from gpuscale.allocator.feasibility import Obstacle, obstacle
from gpuscale.allocator.model import Ask, Gpu, Node, NodeState


@dataclass(frozen=True, slots=True)
class Survey:
    """One node as the ask sees it: how many of its GPUs fit, and what is in the way of the others."""

    node: Node
    fitting: int
    in_the_way: tuple[tuple[Obstacle, Gpu], ...]

    @property
    def counts(self) -> Counter[Obstacle]:
        """How many GPUs each obstacle keeps out."""
        return Counter(found for found, _ in self.in_the_way)

    @property
    def unreachable(self) -> bool:
        """Whether nothing at all is known of the node at the moment: it is not online, or all it said is too old."""
        if self.node.state is not NodeState.ONLINE:
            return True
        return bool(self.node.gpus) and self.counts[Obstacle.STALE] == len(self.node.gpus)

    def large_enough(self, ask: Ask) -> int:
        """How many of its GPUs would have the memory asked for if all of it were free; unknown counts as enough."""
        totals = (gpu.memory_total_bytes for gpu in self.node.gpus)
        return sum(1 for total in totals if total is None or total >= ask.min_memory_bytes)

    def could_ever_serve(self, ask: Ask) -> bool:
        """Whether the node would serve the ask if all of it were free; a node not yet heard of might."""
        return not self.node.reported or self.large_enough(ask) >= ask.gpu_count


def survey(nodes: Sequence[Node], held: Container[str], ask: Ask, now: float) -> list[Survey]:
    """Look at each node, in the order of their ranks."""
    return [_look(node, held, ask, now) for node in sorted(nodes, key=lambda node: node.rank)]


def nearest(candidates: Sequence[Survey]) -> Survey:
    """The node that came nearest: most fitting GPUs, then most GPUs, then first seen. `candidates` is not empty."""
    return max(candidates, key=lambda one: (one.fitting, len(one.node.gpus), -one.node.rank))


def _look(node: Node, held: Container[str], ask: Ask, now: float) -> Survey:
    found = [(obstacle(node, gpu, held, ask, now), gpu) for gpu in node.gpus]
    in_the_way = tuple((reason, gpu) for reason, gpu in found if reason is not None)
    return Survey(node, len(found) - len(in_the_way), in_the_way)
