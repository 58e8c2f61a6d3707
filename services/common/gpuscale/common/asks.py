"""What is wrong with an ask for GPUs that no single field shows: whoever takes one refuses it with the same words. Pure."""

from collections.abc import Iterator

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.common.errors import FieldViolation

_WHOLE = 1000
"""Thousandths of a GPU."""


def contradictions(ask: allocator_api.Ask, path: str) -> Iterator[FieldViolation]:
    """What no node could ever satisfy, by what is wrong with it; `path` leads to the ask, such as `ask.`."""
    if ask.gpu_milli == _WHOLE and ask.HasField("gpu_memory_bytes"):
        yield FieldViolation(
            f"{path}gpu_memory_bytes", "is for a share, but gpu_milli asks for the whole GPU: leave out one"
        )
    nodes, excluded_nodes = set(ask.nodes), set(ask.excluded_nodes)
    excluded = {name.lower() for name in ask.excluded_gpus}
    seen: set[str] = set()
    for index, name in enumerate(ask.gpus):
        key, node = name.lower(), name.rpartition("/gpus/")[0]
        found = {
            "is named twice": key in seen,
            "is one of excluded_gpus too": key in excluded,
            "is on one of excluded_nodes": node in excluded_nodes,
            "is on none of nodes": bool(nodes) and node not in nodes,
        }
        yield from (FieldViolation(f"{path}gpus[{index}]", what) for what, wrong in found.items() if wrong)
        seen.add(key)
    for index, name in enumerate(ask.nodes):
        if name in excluded_nodes:
            yield FieldViolation(f"{path}nodes[{index}]", "is one of excluded_nodes too")
