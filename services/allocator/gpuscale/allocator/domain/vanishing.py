"""Vanishing: GPUs under a lease that their node, although it reports, no longer has. Pure.

A node that is silent, or cannot read its GPUs, proves nothing about them. Only one that is ONLINE and does not name a
GPU any more, or names it as LOST, for longer than a moment has lost it; so has one that the fleet was told to forget,
and one that has split it into MIG instances: the GPU as a whole is none any more, and these are offered once it is lost.
"""

from collections import defaultdict
from collections.abc import Mapping

from gpuscale.allocator.domain.model import Node, NodeState
from gpuscale.allocator.domain.use import Use

LOST = "LOST"
"""Trouble of a GPU that fell off its bus."""


class Vanishing:
    """Since when held GPUs are missing.

    Args:
        after: seconds for which a GPU must be missing to be lost.
    """

    def __init__(self, after: float) -> None:
        self._after = after
        self._missing: dict[str, dict[str, float]] = defaultdict(dict)

    def observe(self, node: Node, use: Use, now: float) -> None:
        """Take in a node as it is now."""
        silent = node.state is not NodeState.ONLINE or not node.reported or node.gpu_problem
        if silent and not node.forgotten:
            self._missing.pop(node.id, None)
            return
        there = {gpu.uuid for gpu in node.gpus if gpu.trouble != LOST} - {gpu.parent for gpu in node.gpus}
        held = {gpu.uuid for one in use.reservations(node.id) for gpu in one.gpus if gpu.node == node.id}
        since = self._missing.pop(node.id, {})
        if missing := held - there:
            self._missing[node.id] = {uuid: since.get(uuid, now) for uuid in missing}

    def lost(self, use: Use, now: float) -> Mapping[str, set[str]]:
        """The GPUs that are lost, by the reservations that hold them."""
        found: dict[str, set[str]] = defaultdict(set)
        for missing in self._missing.values():
            for uuid, since in missing.items():
                if now - since >= self._after:
                    for reservation in use.gpu(uuid).reservations:
                        found[reservation].add(uuid)
        return found
