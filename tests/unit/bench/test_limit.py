"""The bound on what placements fill: no placement breaks a row of the program."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from bench._limit import Kind, kind_of, limits
from bench._replay import Cluster
from bench._traces import MIB, Trace, demand, node
from gpuscale.allocator.domain.model import Ask

NODES = tuple(
    node(f"n{rank}", rank, gpus, model, cores * 1000, 64_000 * MIB)
    for rank, (gpus, model, cores) in enumerate(
        [(1, "T4", 8), (2, "T4", 50), (4, "G2", 32), (8, "G2", 95)] * 3
    )
)


def _asks(chance: random.Random) -> tuple[Ask, ...]:
    sizes = [(1, chance.randrange(50, 1000)) for _ in range(8)] + [(count, 1000) for count in (1, 2, 4, 8)]
    return tuple(
        replace(
            Ask(count, 0, 100.0),
            gpu_milli=milli,
            cpu_milli=chance.randrange(0, 16_000) * count,
            host_memory_bytes=chance.randrange(0, 30_000) * MIB,
            models=chance.choice(((), (), ("T4",), ("G2",))),
        )
        for count, milli in sizes
        for _ in range(2)
    )


@pytest.mark.parametrize("seed", range(20))
def test_no_placement_breaks_a_row(seed: int) -> None:
    chance = random.Random(seed)
    trace = Trace("made up", NODES, _asks(chance))
    kinds = {one.id: kind_of(one) for one in NODES}
    cluster, came, served = Cluster(trace, "random", seed), Counter[Ask](), Counter[tuple[Ask, Kind]]()
    for _ in range(200):  # few shapes at a time, so that bins are full of few sizes
        for ask in [chance.choice(trace.asks)] * 5:
            came[ask] += 1
            if name := cluster.take(ask):
                served[ask, kinds[name.split(" ", 1)[1]]] += 1
    program = limits(NODES, came)
    assert set(served) <= set(program.columns)
    assert sum(demand(ask) * many for (ask, _), many in served.items()) > trace.capacity / 3
    for key, row in program.rows.items():
        total = sum(value * served[program.columns[column]] for column, value in row.items())
        assert total <= program.most[key] + 1e-9, key


def test_what_a_gpu_cannot_hold_twice_counts_as_a_whole_one() -> None:
    share = replace(Ask(1, 0, 100.0), gpu_milli=510)
    program = limits(NODES[:1], {share: 5.0})
    assert min(program.most[key] / row[0] for key, row in program.rows.items() if 0 in row) == 1.0
