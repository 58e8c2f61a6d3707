"""Traces of GPU clusters in the format of openb (Alibaba cluster-trace-gpu-v2023), read and turned into asks.

The files are not part of this project: github.com/hkust-adsl/kubernetes-scheduler-simulator has them under data/csv
(Apache-2.0). Nodes: sn, cpu_milli, memory_mib, gpu, model. Requests: name, cpu_milli, memory_mib, num_gpu, gpu_milli,
gpu_spec (models joined by a bar). Published results: workload, policy and a100, a130 (per cent of all GPUs).
"""

from __future__ import annotations

import csv
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from gpuscale.allocator.domain.model import WHOLE, Ask, Gpu, Node, NodeState, Policy
from gpuscale.allocator.placing.policies import AskClass, class_of

MIB = 1024 * 1024
GPU_MEMORY = 16 * 1024 * MIB
FOR_EVER = float("inf")
WATTS = {"A10": 150, "G2": 150, "G3": 400, "P100": 250, "T4": 70, "V100M16": 300, "V100M32": 300}
"""Power limits by NVIDIA's data sheets; what G2 and G3 are is not told: they are taken for A10 and A100."""
LAYOUTS = (
    ("1g.10gb",) * 7,
    ("3g.40gb", "2g.20gb", "2g.20gb"),
    ("3g.40gb", *("1g.10gb",) * 4),
)
"""MIG instances of a GPU."""
NAMES = {
    "random": "01-Random",
    "bestfit": "05-BestFit",
    "fgd": "06-FGD",
}
"""Policies that were published, by our names."""


@dataclass(frozen=True)
class Trace:
    """Nodes and the requests of one workload."""

    name: str
    nodes: tuple[Node, ...]
    asks: tuple[Ask, ...]

    @cached_property
    def capacity(self) -> int:
        """Thousandths of GPUs that there are."""
        return WHOLE * sum(len(node.gpus) for node in self.nodes)

    def classes(self) -> Mapping[AskClass, int]:
        """How often each class of asks comes."""
        return Counter(class_of(ask) for ask in self.asks)

    def drawn(self, seed: int) -> Trace:
        """The same with its nodes in random order, by which ties go: so did the published simulator for each of its seeds."""
        nodes = list(self.nodes)
        random.Random(f"nodes {seed}").shuffle(nodes)
        return replace(self, nodes=tuple(replace(node, rank=rank) for rank, node in enumerate(nodes)))

    def arrivals(self, policy: Policy, seed: int, load: float) -> Iterator[Ask]:
        """All requests in random order, then random ones, until `load` times the capacity was asked for."""
        chance = random.Random(seed)
        order = list(self.asks)
        chance.shuffle(order)
        arrived = 0
        for place in range(1_000_000):
            ask = order[place] if place < len(order) else chance.choice(self.asks)
            arrived += demand(ask)
            yield with_policy(ask, policy)
            if arrived >= load * self.capacity:
                return


def demand(ask: Ask) -> int:
    """Thousandths of GPUs that an ask takes."""
    return ask.gpu_count * ask.gpu_milli


_BY_POLICY: dict[tuple[Ask, Policy], Ask] = {}


def with_policy(ask: Ask, policy: Policy) -> Ask:
    """The ask with a policy; the same object each time."""
    found = _BY_POLICY.get((ask, policy))
    if found is None:
        fields = {
            name: getattr(ask, name)
            for name in ("cpu_milli", "host_memory_bytes", "gpu_milli", "models", "mig_profile")
        }
        found = Ask(ask.gpu_count, 0, 100.0, policy=policy, **fields)
        _BY_POLICY[ask, policy] = found
    return found


def read_nodes(path: Path) -> tuple[Node, ...]:
    """The nodes of a file, ranked in its order; their GPUs are idle, and tell no power limit."""
    with path.open(newline="") as lines:
        return tuple(_node(rank, row) for rank, row in enumerate(csv.DictReader(lines)))


def with_watts(trace: Trace) -> Trace:
    """The same, with GPUs that tell their watts."""

    def told(gpu: Gpu) -> Gpu:
        return replace(gpu, rated_watts=WATTS[gpu.model])

    return replace(trace, nodes=tuple(replace(one, gpus=tuple(map(told, one.gpus))) for one in trace.nodes))


def read_asks(path: Path) -> tuple[Ask, ...]:
    """The requests of a file."""
    with path.open(newline="") as lines:
        return tuple(_ask(row) for row in csv.DictReader(lines))


def read_published(path: Path | None) -> dict[tuple[str, str], tuple[float, float]]:
    """Published per cent of GPUs allocated at 100 and 130 % arrival, by workload and our name of the policy."""
    if path is None or not path.exists():
        return {}
    ours = {theirs: name for name, theirs in NAMES.items()}
    with path.open(newline="") as lines:
        return {
            (row["workload"], ours.get(row["policy"], row["policy"])): (
                float(row["a100"]),
                float(row["a130"]),
            )
            for row in csv.DictReader(lines)
        }


def made_up(nodes: int, gpus: int) -> tuple[Node, ...]:
    """A fleet of equal nodes."""
    return tuple(
        node(f"n{rank}", rank, gpus, "G2", 12_000 * gpus, 48 * 1024 * MIB * gpus) for rank in range(nodes)
    )


def partitioned(nodes: int, gpus: int, seed: int) -> Trace:
    """Nodes whose GPUs are divided at random, and an ask for an instance like each of theirs."""
    chance, found = random.Random(seed), list[Node]()
    for rank in range(nodes):
        instances = [
            replace(_gpu(f"n{rank}-{one}-{at}", one, "MIG"), mig_profile=profile, parent=f"n{rank}-{one}")
            for one in range(gpus)
            for at, profile in enumerate(chance.choice(LAYOUTS))
        ]
        found.append(replace(node(f"n{rank}", rank, 0, "", 0, 0), gpus=tuple(instances)))
    profiles = [gpu.mig_profile for one in found for gpu in one.gpus]
    asks = tuple(replace(Ask(1, 0, 100.0), mig_profile=profile) for profile in profiles)
    return Trace("MIG", tuple(found), asks)


def node(name: str, rank: int, gpus: int, model: str, cpu_milli: int, memory: int) -> Node:
    """A node with idle GPUs."""
    return Node(
        id=name,
        rank=rank,
        state=NodeState.ONLINE,
        gpus=tuple(_gpu(f"{name}-{index}", index, model) for index in range(gpus)),
        cpu_milli=cpu_milli,
        memory_total_bytes=memory,
    )


def _node(rank: int, row: Mapping[str, str]) -> Node:
    memory = int(row["memory_mib"]) * MIB
    return node(row["sn"], rank, int(row["gpu"]), row["model"], int(row["cpu_milli"]), memory)


def _gpu(uuid: str, index: int, model: str) -> Gpu:
    return Gpu(
        uuid=uuid,
        index=index,
        model=model,
        simulated=True,
        trouble="",
        memory_total_bytes=GPU_MEMORY,
        memory_free_bytes=GPU_MEMORY,
        utilization_percent=0.0,
        fresh_until=FOR_EVER,
    )


def _ask(row: Mapping[str, str]) -> Ask:
    count = int(row["num_gpu"])
    return Ask(
        gpu_count=count,
        min_memory_bytes=0,
        max_utilization_percent=100.0,
        gpu_milli=int(row["gpu_milli"]) if count else WHOLE,
        cpu_milli=int(row["cpu_milli"]),
        host_memory_bytes=int(row["memory_mib"]) * MIB,
        models=_models(row.get("gpu_spec", "")),
    )


def _models(text: str) -> tuple[str, ...]:
    return tuple(sorted(name for name in text.split("|") if name))
