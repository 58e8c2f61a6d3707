"""Sets: which of a node's GPUs an ask gets, of those that fit. Pure, and the same whatever order they are given in."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import comb
from typing import NamedTuple

from gpuscale.allocator.domain.model import Gpu, GpuSet

MOST_SETS = 20_000
"""Up to so many sets are all compared; of more, a set is grown from the best pair (16 GPUs have 12870 sets of 8)."""


class Candidate(NamedTuple):
    """A GPU that fits, and its column: what nobody holds of it, the memory a newcomer has there, and how good it is."""

    gpu: Gpu
    column: int
    free_milli: int
    available: int
    value: float

    @property
    def place(self) -> tuple[int, str]:
        """Its place among the GPUs of its node."""
        return self.gpu.index, self.gpu.uuid


def best_first(one: Candidate) -> tuple[float, int, str]:
    """Sort key: the highest value, then the lowest index."""
    return -one.value, one.gpu.index, one.gpu.uuid


def tightest_first(one: Candidate) -> tuple[int, int, int, str]:
    """Sort key: the GPU of which least is free, so that whole ones stay whole."""
    return one.free_milli, one.available, one.gpu.index, one.gpu.uuid


def choose(candidates: Sequence[Candidate], count: int, wanted: GpuSet) -> list[Candidate]:
    """The GPUs to take of `candidates`, which are at least `count` and in the order of preference."""
    if wanted is GpuSet.BEST or count < 2 or count == len(candidates):
        return list(candidates[:count])
    if wanted is GpuSet.NVLINK:
        return _best_linked(candidates, count)
    return _balanced(candidates, count)


def _balanced(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """The least free memory as large as possible, then the spread as small: those just above the `count`-th largest.

    Of 80, 60 and 60 GB the two balanced ones are 60 and 60.
    """
    by_memory = sorted(candidates, key=lambda one: (-one.available, one.place))
    least = by_memory[count - 1].available
    enough = [one for one in by_memory if one.available >= least]
    return sorted(enough, key=lambda one: (one.available, one.place))[:count]


def _best_linked(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """The set with the most NVLink connections inside; of equals the first in the order of preference."""
    links = [[_links(one, other) for other in candidates] for one in candidates]
    everyone = range(len(candidates))
    if comb(len(candidates), count) <= MOST_SETS:
        best = max(combinations(everyone, count), key=lambda chosen: _inside(links, chosen))
        return [candidates[one] for one in best]
    chosen: list[int] = []
    while len(chosen) < count:
        rest = [one for one in everyone if one not in chosen]
        chosen.append(max(rest, key=lambda one: _gain(links, chosen, one)))
    return [candidates[one] for one in sorted(chosen)]


def _gain(links: Sequence[Sequence[int]], chosen: Sequence[int], one: int) -> tuple[int, int]:
    return sum(links[one][other] for other in chosen), max(links[one]) if not chosen else 0


def _inside(links: Sequence[Sequence[int]], chosen: Sequence[int]) -> int:
    return sum(links[one][other] for one, other in combinations(chosen, 2))


def _links(one: Candidate, other: Candidate) -> int:
    return max(_toward(one.gpu.nvlinks, other.gpu.uuid), _toward(other.gpu.nvlinks, one.gpu.uuid))


def _toward(nvlinks: Mapping[str, int], uuid: str) -> int:
    return nvlinks.get(uuid, 0)
