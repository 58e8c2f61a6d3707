"""Obstacles: why a GPU cannot serve an ask, in the order in which they are looked for. Pure.

Unknown is never free: a GPU whose memory is not reported, or whose readings are too old, serves nobody.
"""

from enum import StrEnum

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
