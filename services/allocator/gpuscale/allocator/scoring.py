"""Score of a GPU for the placement policy `spread`, with its parts.

The rule is the one of the GPU tracking seed (seeds/001): 0.6 x free/total + 0.4 x (100 - utilization)/100, both
shares computed first and then weighted, in that order, so that results agree with the seed's to the last bit.
"""

from gpuscale.allocator.model import Gpu, Score, ScorePart, Weights

UNKNOWN_UTILIZATION = "utilization is not reported: scored by memory alone"


def spread(gpu: Gpu, weights: Weights) -> float:
    """Score a GPU: the freer its memory and the idler it is, the higher; 0-1 with the default weights.

    A GPU that does not report its utilization gets no credit for being idle.

    Raises:
        ValueError: the GPU does not report its memory; placement lets no such GPU through.
    """
    if gpu.utilization_percent is None:
        return weights.memory * _free_share(gpu)
    return weights.memory * _free_share(gpu) + weights.utilization * _idle_share(gpu.utilization_percent)


def explained(gpu: Gpu, weights: Weights) -> Score:
    """The score of a GPU with its parts, and a note where it was scored by memory alone. Raises as `spread` does."""
    utilization = gpu.utilization_percent
    idle = None if utilization is None else _idle_share(utilization)
    parts = (
        ScorePart("memory", _free_share(gpu), weights.memory),
        ScorePart("utilization", idle, weights.utilization),
    )
    return Score(spread(gpu, weights), parts, UNKNOWN_UTILIZATION if idle is None else "")


def _free_share(gpu: Gpu) -> float:
    if gpu.memory_free_bytes is None or gpu.memory_total_bytes is None:
        raise ValueError(f"GPU {gpu.uuid} does not report its memory")
    return gpu.memory_free_bytes / gpu.memory_total_bytes


def _idle_share(utilization_percent: float) -> float:
    return (100 - utilization_percent) / 100
