"""Score of a GPU for the placement policy `spread`, with its parts.

The rule is the one of the GPU tracking seed (seeds/001): 0.6 x free/total + 0.4 x (100 - utilization)/100, both
shares computed first and then weighted, in that order, so that results agree with the seed's to the last bit.
"""

from gpuscale.allocator.domain.model import Gpu, Score, ScorePart, Weights

UNKNOWN_UTILIZATION = "utilization is not reported: scored by memory alone"


def spread(gpu: Gpu, weights: Weights) -> float:
    """Score a GPU: the freer its memory and the idler it is, the higher; 0-1 with the default weights.

    A GPU that does not report its utilization gets no credit for being idle.

    Raises:
        ValueError: the GPU does not report its memory; placement lets no such GPU through.
    """
    return explained(gpu, weights).total


def explained(gpu: Gpu, weights: Weights) -> Score:
    """The score of a GPU with its parts, and a note where it was scored by memory alone. Raises as `spread` does."""
    return scored(gpu, weights, gpu.memory_free_bytes)


def scored(gpu: Gpu, weights: Weights, free_bytes: int | None, note: str = "") -> Score:
    """As `explained`, of a GPU of whose memory so much is free. Raises as `spread` does."""
    if free_bytes is None or gpu.memory_total_bytes is None:
        raise ValueError(f"GPU {gpu.uuid} does not report its memory")
    free, used = free_bytes / gpu.memory_total_bytes, gpu.utilization_percent
    total, idle = weights.memory * free, None
    if used is None:
        note = UNKNOWN_UTILIZATION
    else:
        idle = (100 - used) / 100
        total += weights.utilization * idle
    parts = ScorePart("memory", free, weights.memory), ScorePart("utilization", idle, weights.utilization)
    return Score(total, parts, note)
