"""Obstacles: why a GPU cannot serve an ask, in the order in which they are looked for, and in words. Pure.

Unknown is never free: a GPU whose memory is not reported, or whose readings are too old, serves nobody.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum

from gpuscale.allocator.domain.model import WHOLE, Ask, Gpu

ADMITS_ALL_PERCENT = 100.0
"""A utilization limit that admits a GPU however busy it is."""


class Obstacle(StrEnum):
    """Why a GPU cannot serve an ask; of several, the first in this order is named.

    Those of LASTING stay whatever ends or comes back; the others pass.
    """

    NODE_NOT_SELECTED = "NODE_NOT_SELECTED"
    LABELS_DIFFER = "LABELS_DIFFER"
    GPU_NOT_SELECTED = "GPU_NOT_SELECTED"
    MODEL_DIFFERS = "MODEL_DIFFERS"
    MIG_PROFILE_DIFFERS = "MIG_PROFILE_DIFFERS"
    NODE_NOT_ONLINE = "NODE_NOT_ONLINE"
    STALE = "STALE"
    GPU_NOT_OK = "GPU_NOT_OK"
    QUARANTINED = "QUARANTINED"
    CORDONED = "CORDONED"
    NOT_APART = "NOT_APART"
    HELD = "HELD"
    CPU_BELOW_MIN = "CPU_BELOW_MIN"
    HOST_MEMORY_BELOW_MIN = "HOST_MEMORY_BELOW_MIN"
    MEMORY_UNKNOWN = "MEMORY_UNKNOWN"
    MEMORY_BELOW_MIN = "MEMORY_BELOW_MIN"
    UTILIZATION_UNKNOWN = "UTILIZATION_UNKNOWN"
    UTILIZATION_TOO_HIGH = "UTILIZATION_TOO_HIGH"


ORDER = tuple(Obstacle)
"""All obstacles in their order."""
LASTING = frozenset(ORDER[: ORDER.index(Obstacle.MIG_PROFILE_DIFFERS) + 1])
"""Obstacles that no end of a reservation cures."""


MIB = 1024 * 1024
MOST_NAMES = 5
"""How many names one message lists."""

WORDS: Mapping[Obstacle, str] = {
    Obstacle.NODE_NOT_SELECTED: "on nodes that were not chosen",
    Obstacle.LABELS_DIFFER: "on nodes without the labels",
    Obstacle.GPU_NOT_SELECTED: "that were not chosen",
    Obstacle.MODEL_DIFFERS: "of another model",
    Obstacle.MIG_PROFILE_DIFFERS: "that are not of the kind asked for (whole, or the MIG profile)",
    Obstacle.NODE_NOT_ONLINE: "behind an agent that is not connected",
    Obstacle.STALE: "with readings that are too old",
    Obstacle.GPU_NOT_OK: "that do not answer",
    Obstacle.QUARANTINED: "quarantined",
    Obstacle.CORDONED: "cordoned",
    Obstacle.NOT_APART: "beside a reservation to stay apart from",
    Obstacle.HELD: "held by other reservations",
    Obstacle.CPU_BELOW_MIN: "on nodes with too little CPU left",
    Obstacle.HOST_MEMORY_BELOW_MIN: "on nodes with too little main memory left",
    Obstacle.MEMORY_UNKNOWN: "whose memory is not reported",
    Obstacle.MEMORY_BELOW_MIN: "with too little free memory",
    Obstacle.UTILIZATION_UNKNOWN: "whose utilization is not reported",
    Obstacle.UTILIZATION_TOO_HIGH: "that are too busy",
}
"""What is said of the GPUs that an obstacle keeps out."""

HELP: Mapping[Obstacle, str] = {
    Obstacle.HELD: "wait until a reservation ends",
    Obstacle.MEMORY_BELOW_MIN: "ask for less memory",
    Obstacle.UTILIZATION_TOO_HIGH: "allow a higher utilization",
    Obstacle.UTILIZATION_UNKNOWN: "allow unknown utilization",
    Obstacle.NODE_NOT_ONLINE: "start the agent",
    Obstacle.STALE: "see why the node stopped reporting",
    Obstacle.CPU_BELOW_MIN: "ask for less CPU",
    Obstacle.HOST_MEMORY_BELOW_MIN: "ask for less main memory",
    Obstacle.QUARANTINED: "lift the quarantine",
    Obstacle.CORDONED: "take back the cordon",
    Obstacle.NOT_APART: "allow it beside the others",
    Obstacle.MODEL_DIFFERS: "admit other models",
    Obstacle.LABELS_DIFFER: "ask for other labels",
    Obstacle.NODE_NOT_SELECTED: "choose other nodes",
    Obstacle.GPU_NOT_SELECTED: "choose other GPUs",
}
"""What cures an obstacle."""

FOR_EVER = frozenset(
    {
        Obstacle.NODE_NOT_SELECTED,
        Obstacle.LABELS_DIFFER,
        Obstacle.GPU_NOT_SELECTED,
        Obstacle.MODEL_DIFFERS,
    }
)
"""What the caller chose: named as a help only where it is asked what would help."""


def names(texts: Sequence[str]) -> str:
    """Join texts for a message, the first few of them."""
    more = len(texts) - MOST_NAMES
    return ", ".join(texts[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def sentence(text: str) -> str:
    """A text as a sentence."""
    return f"{text[0].upper()}{text[1:]}."


def asked(ask: Ask) -> str:
    """What an ask asks for."""
    several = ask.gpu_count > 1 or ask.member_count > 1
    each = "each " if several else ""
    wishes = [_what(ask)]
    if ask.min_memory_bytes:
        wishes.append(f"{each}with {mib(ask.min_memory_bytes)} free")
    if ask.max_utilization_percent < ADMITS_ALL_PERCENT:
        wishes.append(f"{each}used less than {ask.max_utilization_percent:g} %")
    if ask.models:
        wishes.append(f"of model {' or '.join(ask.models)}")
    if ask.cpu_milli:
        wishes.append(f"beside {ask.cpu_milli / WHOLE:g} cores")
    if ask.host_memory_bytes:
        wishes.append(f"beside {mib(ask.host_memory_bytes)} of main memory")
    if ask.node_labels:
        wishes.append(f"on nodes with {names([f'{key}={value}' for key, value in ask.node_labels])}")
    if ask.nodes:
        wishes.append(f"on {names(sorted(ask.nodes))}")
    return ", ".join(wishes)


def gpus(count: int) -> str:
    """So many GPUs."""
    return f"{count} GPU{'' if count == 1 else 's'}"


def mib(size: int) -> str:
    """A size of memory."""
    return f"{size // MIB} MiB"


def extent(reason: Obstacle, found: Sequence[Gpu]) -> str:
    """How far the GPUs that an obstacle keeps out are from what was asked for."""
    if reason is Obstacle.MEMORY_BELOW_MIN:
        return f" ({mib(max(gpu.memory_free_bytes or 0 for gpu in found))} at most)"
    if reason is Obstacle.UTILIZATION_TOO_HIGH:
        return f" ({min(gpu.utilization_percent or 0 for gpu in found):g} % at least)"
    if reason is Obstacle.GPU_NOT_OK:
        return f" ({names(sorted({gpu.trouble for gpu in found}))})"
    if reason is Obstacle.QUARANTINED:
        return f" ({names(sorted({gpu.quarantine for gpu in found}))})"
    if reason is Obstacle.MODEL_DIFFERS:
        return f" ({names(sorted({gpu.model for gpu in found}))})"
    return ""


def _what(ask: Ask) -> str:
    if not ask.gpu_count:
        return "room without a GPU"
    what = gpus(ask.gpu_count)
    if ask.mig_profile:
        what = f"{ask.gpu_count} MIG instance{'' if ask.gpu_count == 1 else 's'} {ask.mig_profile}"
    elif ask.gpu_memory_bytes is not None:
        what = f"{mib(ask.gpu_memory_bytes)} of {what}"
    elif not ask.exclusive:
        what = f"{ask.gpu_milli / WHOLE:g} of {what}"
    if ask.member_count > 1:
        return f"{ask.member_count} x {what} ({ask.gang_strategy.value.replace('_', ' ')})"
    return f"{what} of one node" if ask.gpu_count > 1 else what


def lifting(node: str, quarantined: Sequence[Gpu]) -> str:
    """The command that lifts quarantines of GPUs of a node."""
    spots = [f"{node}/{gpu.parent or gpu.uuid}" for gpu in quarantined]
    return f"gpuscalectl clear quarantine {' '.join(sorted(set(spots))[:MOST_NAMES])}"
