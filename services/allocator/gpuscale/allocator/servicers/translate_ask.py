"""Translate what is asked for: from the contract's `Ask` to the allocator's."""

import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from gpuscale.allocator.domain.model import WHOLE, Ask, GangStrategy, GpuSet, Policy, Weights
from gpuscale.allocator.settings import AllocatorSettings
from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.common import names
from gpuscale.common.errors import FieldViolation, InvalidArgumentError

_MIB = 1024 * 1024
_GB = 10**9
_MIG_MEMORY = re.compile(r"\.(\d{1,6})gb", re.IGNORECASE)

POLICIES = {
    allocator_api.PlacementPolicy.PLACEMENT_POLICY_SPREAD: Policy.SPREAD,
    allocator_api.PlacementPolicy.PLACEMENT_POLICY_PACK: Policy.PACK,
    allocator_api.PlacementPolicy.PLACEMENT_POLICY_BESTFIT: Policy.BESTFIT,
    allocator_api.PlacementPolicy.PLACEMENT_POLICY_FIRSTFIT: Policy.FIRSTFIT,
    allocator_api.PlacementPolicy.PLACEMENT_POLICY_FGD: Policy.FGD,
}
_STRATEGIES = {
    allocator_api.GangStrategy.GANG_STRATEGY_STRICT_PACK: GangStrategy.STRICT_PACK,
    allocator_api.GangStrategy.GANG_STRATEGY_SPREAD: GangStrategy.SPREAD,
    allocator_api.GangStrategy.GANG_STRATEGY_STRICT_SPREAD: GangStrategy.STRICT_SPREAD,
}
_SETS = {
    allocator_api.GpuSet.GPU_SET_NVLINK: GpuSet.NVLINK,
    allocator_api.GpuSet.GPU_SET_MEMORY_BALANCED: GpuSet.MEMORY_BALANCED,
}


_REMEMBERED = 1024
"""Asks that are kept: callers ask for the same again and again."""
_known: OrderedDict[tuple[bytes, int], tuple[AllocatorSettings, Ask]] = OrderedDict()


def to_ask(request: allocator_api.Ask, defaults: AllocatorSettings, path: str = "ask.") -> Ask:
    """The ask of a valid message; what it leaves open is filled in from the settings.

    `path` leads to the ask in the message that it is part of.

    Raises:
        InvalidArgumentError: a name is none, or parts of the ask contradict each other; every one that does is named.
    """
    key = request.SerializeToString(deterministic=True), id(defaults)
    known = _known.get(key)
    if known is not None and known[0] is defaults:
        return known[1]
    ask = _translated(request, defaults, path)
    _known[key] = defaults, ask
    if len(_known) > _REMEMBERED:
        _known.popitem(last=False)
    return ask


def _translated(request: allocator_api.Ask, defaults: AllocatorSettings, path: str) -> Ask:
    if problems := list(_contradictions(request, path)):
        first = problems[0]
        raise InvalidArgumentError(f"{first.field} {first.description}", violations=problems)
    weights = request.weights
    gpus = [names.parse(names.GPU, name) for name in request.gpus]
    nodes = _nodes(request.nodes) or frozenset(gpu["node"] for gpu in gpus)
    return Ask(
        gpu_count=request.gpu_count,
        min_memory_bytes=_min_memory(request, defaults),
        max_utilization_percent=(
            request.max_utilization_percent
            if request.HasField("max_utilization_percent")
            else defaults.default_max_utilization_percent
        ),
        allow_unknown_utilization=(
            request.allow_unknown_utilization
            if request.HasField("allow_unknown_utilization")
            else request.mig_profile != ""
        ),
        policy=POLICIES.get(request.policy, Policy(defaults.default_policy)),
        weights=Weights(
            weights.memory if weights.HasField("memory") else defaults.memory_weight,
            weights.utilization if weights.HasField("utilization") else defaults.utilization_weight,
        ),
        nodes=nodes,
        gpu_milli=request.gpu_milli if request.HasField("gpu_milli") else WHOLE,
        gpu_memory_bytes=request.gpu_memory_bytes if request.HasField("gpu_memory_bytes") else None,
        mig_profile=request.mig_profile,
        models=tuple(request.models),
        cpu_milli=request.cpu_milli,
        host_memory_bytes=request.host_memory_bytes,
        excluded_nodes=_nodes(request.excluded_nodes),
        gpus=frozenset(gpu["gpu"] for gpu in gpus),
        excluded_gpus=frozenset(names.parse(names.GPU, name)["gpu"] for name in request.excluded_gpus),
        node_labels=tuple(sorted(request.node_labels.items())),
        apart_from=tuple(sorted(request.apart_from.items())),
        gpu_set=_SETS.get(request.gpu_set, GpuSet.BEST),
        member_count=request.member_count if request.HasField("member_count") else 1,
        gang_strategy=_STRATEGIES.get(request.gang_strategy, GangStrategy.PACK),
    )


def _min_memory(request: allocator_api.Ask, defaults: AllocatorSettings) -> int:
    if request.HasField("min_memory_bytes"):
        return request.min_memory_bytes
    if request.HasField("gpu_memory_bytes"):
        return request.gpu_memory_bytes
    if request.HasField("gpu_milli") and request.gpu_milli < WHOLE:
        return 0  # the memory that goes with the share has to be free, and no more
    usual = defaults.default_min_memory_mib * _MIB
    named = _MIG_MEMORY.search(request.mig_profile)
    return usual if named is None else min(usual, int(named.group(1)) * _GB * 9 // 10)


def _nodes(resources: Sequence[str]) -> frozenset[str]:
    return frozenset(names.parse(names.NODE, name)["node"] for name in resources)


def _contradictions(request: allocator_api.Ask, path: str) -> Iterator[FieldViolation]:
    """What no node could ever satisfy, by what is wrong with it."""
    if request.gpu_milli == WHOLE and request.HasField("gpu_memory_bytes"):
        yield FieldViolation(
            f"{path}gpu_memory_bytes", "is for a share, but gpu_milli asks for the whole GPU: leave out one"
        )
    if not (request.gpus or request.excluded_gpus or request.excluded_nodes):
        return
    nodes, excluded_nodes = set(request.nodes), set(request.excluded_nodes)
    seen: set[str] = set()
    excluded = {name.lower() for name in request.excluded_gpus}
    for index, name in enumerate(request.gpus):
        field, key = f"{path}gpus[{index}]", name.lower()
        if key in seen:
            yield FieldViolation(field, "is named twice")
        seen.add(key)
        if key in excluded:
            yield FieldViolation(field, "is one of excluded_gpus too")
        node = name.rpartition("/gpus/")[0]
        if node in excluded_nodes:
            yield FieldViolation(field, "is on one of excluded_nodes")
        if nodes and node not in nodes:
            yield FieldViolation(field, "is on none of nodes")
    for index, name in enumerate(request.nodes):
        if name in excluded_nodes:
            yield FieldViolation(f"{path}nodes[{index}]", "is one of excluded_nodes too")
