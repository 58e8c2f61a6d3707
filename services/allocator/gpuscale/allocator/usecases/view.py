"""View of the fleet: every node as last reported, and the order in which nodes were first seen. Pure.

A node that the fleet no longer names is kept as OFFLINE with the GPUs it had: a fleet that restarts knows only the
agents that have come back so far, and "not back yet" must not read as "never was". Only a node that the fleet was told
to forget goes, once nothing is held on it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from gpuscale.allocator.domain.model import Node, NodeState


class FleetView:
    """What the allocator knows of nodes.

    Args:
        ranks: the rank of each node seen before; new nodes get the ranks after the highest.
    """

    def __init__(self, ranks: Mapping[str, int]) -> None:
        self._ranks = dict(ranks)
        self._next_rank = max(ranks.values(), default=-1) + 1
        self._unsaved: dict[str, int] = {}
        self._nodes = {
            node: Node(node, rank, NodeState.OFFLINE, (), reported=False) for node, rank in ranks.items()
        }
        self._complete = False

    @property
    def complete(self) -> bool:
        """Whether the fleet has named all its nodes since the allocator started, and one of them has reported."""
        return self._complete and any(node.reported for node in self._nodes.values())

    @property
    def nodes(self) -> Sequence[Node]:
        """Every node that is known."""
        return tuple(self._nodes.values())

    def get(self, node: str) -> Node | None:
        """A node by its id."""
        return self._nodes.get(node)

    @property
    def unsaved_ranks(self) -> Mapping[str, int]:
        """Ranks given that are not on disk yet."""
        return dict(self._unsaved)

    def saved(self, ranks: Mapping[str, int]) -> None:
        """These ranks are on disk now."""
        for node in ranks:
            self._unsaved.pop(node, None)

    def rank(self, node: str) -> int:
        """The rank of a node; a node that was never seen gets the next one, for ever."""
        if node not in self._ranks:
            self._ranks[node] = self._unsaved[node] = self._next_rank
            self._next_rank += 1
        return self._ranks[node]

    def forget(self, node_ids: Iterable[str]) -> Sequence[Node]:
        """These nodes are gone for good, unless they report again; return those that were known, as they are now."""
        known = [self._nodes[node] for node in node_ids if node in self._nodes]
        gone = [
            replace(node, state=NodeState.OFFLINE, gpus=(), reported=True, forgotten=True) for node in known
        ]
        self._nodes.update((node.id, node) for node in gone)
        return gone

    def drop(self, node: str) -> int:
        """Know nothing of a node any more; the rank that it had. It is a new one if it ever reports again."""
        del self._nodes[node]
        self._unsaved.pop(node, None)
        return self._ranks.pop(node)

    def apply(self, nodes: Iterable[Node], *, full: bool) -> Sequence[Node]:
        """Take in nodes as they are now, and return all that changed; `full` says that the fleet knows no others.

        A node that a restarted fleet has no snapshot of yet keeps the GPUs that it had.
        """
        reported = {node.id: self._remembered(node) for node in nodes}
        if full:
            self._complete = True
            for node in self._nodes.values():
                reported.setdefault(node.id, replace(node, state=NodeState.OFFLINE))
        self._nodes.update(reported)
        return tuple(reported.values())

    def _remembered(self, node: Node) -> Node:
        known = self._nodes.get(node.id)
        if node.reported or known is None or known.forgotten:
            return node
        return replace(known, state=node.state)
