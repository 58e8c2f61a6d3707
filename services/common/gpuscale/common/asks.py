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
    if not (ask.gpus or ask.excluded_gpus or ask.excluded_nodes):
        return
    nodes, excluded_nodes = set(ask.nodes), set(ask.excluded_nodes)
    seen: set[str] = set()
    excluded = {name.lower() for name in ask.excluded_gpus}
    for index, name in enumerate(ask.gpus):
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
    for index, name in enumerate(ask.nodes):
        if name in excluded_nodes:
            yield FieldViolation(f"{path}nodes[{index}]", "is one of excluded_nodes too")
