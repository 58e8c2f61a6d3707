"""A fleet that is split into pools with an allocator each: what fits where, and how requests find a pool. Pure.

Nodes are alike and GPUs are taken whole, so that best fit needs only to know how many GPUs each node has free; that makes
a million GPUs cheap to play through. What a split costs with nodes that differ is played with the real placer on a trace
(`bench.scale`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

Taken = list[tuple[int, int]]
"""Nodes with how many GPUs of each."""


class Pool:
    """The nodes of one allocator.

    Args:
        nodes: how many.
        per_node: GPUs of each.
    """

    def __init__(self, nodes: int, per_node: int) -> None:
        self.per_node = per_node
        self.free = nodes * per_node
        self._free_of = [per_node] * nodes
        self._by_free: list[set[int]] = [set() for _ in range(per_node)] + [set(range(nodes))]

    def take(self, count: int) -> Taken | None:
        """The GPUs for an ask: of the fullest node that has as many, or of whole nodes; None where they do not fit."""
        whole, rest = divmod(count, self.per_node)
        if len(self._by_free[self.per_node]) < whole:
            return None
        taken = [(self._by_free[self.per_node].pop(), self.per_node) for _ in range(whole)]
        for node, many in taken:
            self._put(node, many)
        if rest:
            level = next((one for one in self._by_free[rest:] if one), None)
            if level is None:
                self.give_back(taken)
                return None
            node = level.pop()
            self._put(node, rest)
            taken.append((node, rest))
        return taken

    def give_back(self, taken: Taken) -> None:
        """Free what an ask was given."""
        for node, many in taken:
            self._by_free[self._free_of[node]].discard(node)
            self._put(node, -many)

    def _put(self, node: int, taken: int) -> None:
        self.free -= taken
        self._free_of[node] -= taken
        self._by_free[self._free_of[node]].add(node)


@dataclass(frozen=True, slots=True)
class Routing:
    """How a request finds its pool.

    Attributes:
        looks: how many pools, picked by chance, are compared by what they have free; one for any pool.
        tries: how many pools are asked before a request is given up, the emptiest of those looked at first.
        refresh: arrivals after which it is learned anew what is free; 1 for always knowing it.
    """

    looks: int
    tries: int
    refresh: int = 1


class Router:
    """Sends requests to pools.

    Args:
        pools: where to.
        routing: how.
        chance: picks pools.
    """

    def __init__(self, pools: Sequence[Pool], routing: Routing, chance: random.Random) -> None:
        self._pools = pools
        self._routing = routing
        self._chance = chance
        self._known: list[int] = []
        self._arrivals = 0
        self.calls = [0] * len(pools)

    def place(self, count: int) -> tuple[int, Taken] | None:
        """Serve an ask; the pool and its GPUs, or None where every pool that was asked turned it away."""
        if self._routing.refresh > 1 and self._arrivals % self._routing.refresh == 0:
            self._known = [pool.free for pool in self._pools]
        self._arrivals += 1
        many = min(len(self._pools), max(self._routing.looks, self._routing.tries))
        seen = self._chance.sample(range(len(self._pools)), many)
        first = sorted(seen[: self._routing.looks], key=lambda one: -self._free(one))
        for one in [*first, *seen[self._routing.looks :]][: self._routing.tries]:
            self.calls[one] += 1
            if (taken := self._pools[one].take(count)) is not None:
                return one, taken
        return None

    def _free(self, pool: int) -> int:
        return self._pools[pool].free if self._routing.refresh == 1 else self._known[pool]
