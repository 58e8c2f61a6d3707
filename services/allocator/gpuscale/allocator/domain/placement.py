"""Placement: what is picked for an ask. Pure."""

from gpuscale.allocator.domain.model import ReservedGpu
from gpuscale.allocator.domain.values import value


@value(frozen=True, slots=True)
class Pick:
    """The GPUs that serve an ask, member by member, best first, and the mean of their scores.

    `nodes` names the node of each member.
    """

    gpus: tuple[ReservedGpu, ...]
    mean_score: float
    nodes: tuple[str, ...] = ()
