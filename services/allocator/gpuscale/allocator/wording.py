"""Wording: a refusal in the words of a person: what was asked, what is nearest, what would help. Pure."""

from collections.abc import Mapping, Sequence

from gpuscale.allocator.feasibility import ADMITS_ALL_PERCENT, Obstacle
from gpuscale.allocator.model import Ask, Gpu, NodeState
from gpuscale.allocator.survey import Survey, nearest

MIB = 1024 * 1024
MOST_NAMES = 5
"""How many names one message lists."""

_WORDS: Mapping[Obstacle, str] = {
    Obstacle.NODE_NOT_SELECTED: "on nodes that were not chosen",
    Obstacle.NODE_NOT_ONLINE: "behind an agent that is not connected",
    Obstacle.STALE: "with readings that are too old",
    Obstacle.GPU_NOT_OK: "that do not answer",
    Obstacle.HELD: "held by other reservations",
    Obstacle.MEMORY_UNKNOWN: "whose memory is not reported",
    Obstacle.MEMORY_BELOW_MIN: "with too little free memory",
    Obstacle.UTILIZATION_UNKNOWN: "whose utilization is not reported",
    Obstacle.UTILIZATION_TOO_HIGH: "that are too busy",
}

_HELP: Mapping[Obstacle, str] = {
    Obstacle.HELD: "wait until a reservation ends",
    Obstacle.MEMORY_BELOW_MIN: "ask for less memory",
    Obstacle.UTILIZATION_TOO_HIGH: "allow a higher utilization",
    Obstacle.UTILIZATION_UNKNOWN: "allow unknown utilization",
    Obstacle.NODE_NOT_ONLINE: "start the agent",
    Obstacle.STALE: "see why the node stopped reporting",
}


def not_found(unknown: Sequence[str], known: Sequence[str]) -> str:
    """Some of the nodes that were chosen do not exist."""
    return f"no such node: {names(unknown)}. The fleet knows {names(known) or 'no node yet'}."


def not_online(candidates: Sequence[Survey]) -> str:
    """None of the nodes that were chosen reports."""
    offline = [one.node.id for one in candidates if one.node.state is NodeState.OFFLINE]
    stale = [one.node.id for one in candidates if one.node.state is not NodeState.OFFLINE]
    said = [f"the agent of {names(offline)} is not connected"] if offline else []
    said += [f"the last report of {names(stale)} is too old"] if stale else []
    return f"nothing can be reserved on the chosen nodes: {'; '.join(said)}. Choose other nodes or start the agent."


def unsatisfiable(candidates: Sequence[Survey], ask: Ask) -> str:
    """No node would serve the ask even if all of it were free."""
    asked = f"{_asked(ask)}: this can never be had, because"
    most = max(candidates, key=lambda one: len(one.node.gpus), default=None)
    if most is None or not most.node.gpus:
        return f"{asked} no node here has a GPU. Start an agent on a host with GPUs, or choose other nodes."
    if len(most.node.gpus) < ask.gpu_count:
        return f"{asked} the largest node, {most.node.id}, has {_gpus(len(most.node.gpus))}. Ask for fewer."
    best = max(candidates, key=lambda one: one.large_enough(ask))
    largest = max(gpu.memory_total_bytes or 0 for one in candidates for gpu in one.node.gpus)
    return (
        f"{asked} {best.node.id} has {best.large_enough(ask)} of that memory size,"
        f" and the largest GPU known has {_mib(largest)}. Ask for less memory or fewer GPUs."
    )


def no_capacity(candidates: Sequence[Survey], ask: Ask) -> str:
    """Some node could serve the ask, but not now."""
    closest = nearest(candidates)
    said: list[str] = []
    if closest.node.gpus:
        rest = ", ".join(_describe(reason, closest) for reason, _ in closest.counts.most_common())
        said.append(
            f"the nearest is {closest.node.id} with {closest.fitting} of {ask.gpu_count} (the rest: {rest})"
        )
    if unreported := [one.node.id for one in candidates if not one.node.reported]:
        said.append(f"not heard of since the allocator started: {names(unreported)}")
    return f"no room now for {_asked(ask)}: {'; '.join(said)}. {_advice(closest, ask)}"


def names(texts: Sequence[str]) -> str:
    """Join texts for a message, the first few of them."""
    more = len(texts) - MOST_NAMES
    return ", ".join(texts[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _describe(reason: Obstacle, closest: Survey) -> str:
    gpus = [gpu for found, gpu in closest.in_the_way if found is reason]
    return f"{len(gpus)} {_WORDS[reason]}{_extent(reason, gpus)}"


def _extent(reason: Obstacle, gpus: Sequence[Gpu]) -> str:
    if reason is Obstacle.MEMORY_BELOW_MIN:
        return f" ({_mib(max(gpu.memory_free_bytes or 0 for gpu in gpus))} at most)"
    if reason is Obstacle.UTILIZATION_TOO_HIGH:
        return f" ({min(gpu.utilization_percent or 0 for gpu in gpus):g} % at least)"
    if reason is Obstacle.GPU_NOT_OK:
        return f" ({names(sorted({gpu.trouble for gpu in gpus}))})"
    return ""


def _advice(closest: Survey, ask: Ask) -> str:
    advice = [words for reason, words in _HELP.items() if closest.counts[reason]]
    if 0 < closest.fitting < ask.gpu_count:
        advice.append(f"ask for {_gpus(closest.fitting)}")
    text = ", or ".join(advice) or "wait until more nodes report"
    return f"{text[0].upper()}{text[1:]}."


def _asked(ask: Ask) -> str:
    wishes = [f"{_gpus(ask.gpu_count)}{' of one node' if ask.gpu_count > 1 else ''}"]
    each = "each " if ask.gpu_count > 1 else ""
    if ask.min_memory_bytes:
        wishes.append(f"{each}with {_mib(ask.min_memory_bytes)} free")
    if ask.max_utilization_percent < ADMITS_ALL_PERCENT:
        wishes.append(f"{each}used less than {ask.max_utilization_percent:g} %")
    if ask.nodes:
        wishes.append(f"on {names(sorted(ask.nodes))}")
    return ", ".join(wishes)


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}"


def _mib(size: int) -> str:
    return f"{size // MIB} MiB"
