"""Refusal: why no node serves an ask, which node came nearest, and what would help. Pure."""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gpuscale.allocator import wording
from gpuscale.allocator.feasibility import Obstacle, selected
from gpuscale.allocator.model import Ask, Node
from gpuscale.allocator.survey import Survey, nearest, survey


class RefusalKind(StrEnum):
    """What sort of no it is; the value is the reason code of the error."""

    NODE_NOT_FOUND = "NODE_NOT_FOUND"
    NODE_NOT_ONLINE = "NODE_NOT_ONLINE"
    UNSATISFIABLE = "UNSATISFIABLE"
    NO_CAPACITY = "NO_CAPACITY"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an ask was not served.

    `obstacles` counts the GPUs of all nodes by what stood in the way; `metadata` says the same, with the nearest
    node, to programs.
    """

    kind: RefusalKind
    message: str
    obstacles: Mapping[Obstacle, int]
    metadata: Mapping[str, str]


def unknown_nodes(nodes: Sequence[Node], ask: Ask) -> Refusal | None:
    """Refuse an ask that names nodes the fleet has never seen; None when it names none."""
    unknown = sorted(ask.nodes - {node.id for node in nodes})
    if not unknown:
        return None
    known = [node.id for node in sorted(nodes, key=lambda node: node.rank)]
    metadata = {"nodes": wording.names(unknown)}
    return Refusal(RefusalKind.NODE_NOT_FOUND, wording.not_found(unknown, known), {}, metadata)


def refuse(nodes: Sequence[Node], held: Container[str], ask: Ask, now: float) -> Refusal:
    """Say why none of the nodes serves the ask. To be called only when none does.

    Nodes that were chosen by name and do not report are said as such. An ask that no node could serve with all of
    its GPUs free is UNSATISFIABLE; any other finds NO_CAPACITY now.
    """
    surveys = survey(nodes, held, ask, now)
    candidates = [one for one in surveys if selected(one.node, ask)]
    if ask.nodes and all(one.unreachable for one in candidates):
        kind, message = RefusalKind.NODE_NOT_ONLINE, wording.not_online(candidates)
    elif not any(one.could_ever_serve(ask) for one in candidates):
        kind, message = RefusalKind.UNSATISFIABLE, wording.unsatisfiable(candidates, ask)
    else:
        kind, message = RefusalKind.NO_CAPACITY, wording.no_capacity(candidates, ask)
    obstacles = sum((one.counts for one in surveys), Counter[Obstacle]())
    return Refusal(kind, message, obstacles, _metadata(candidates, obstacles, ask))


def _metadata(candidates: Sequence[Survey], obstacles: Counter[Obstacle], ask: Ask) -> dict[str, str]:
    metadata = {"gpu_count": str(ask.gpu_count), "min_memory_bytes": str(ask.min_memory_bytes)}
    if candidates:
        closest = nearest(candidates)
        metadata |= {"nearest_node": closest.node.id, "nearest_gpu_count": str(closest.fitting)}
    return metadata | {reason.value.lower(): str(count) for reason, count in sorted(obstacles.items())}
