"""Shares: what an ask takes of a GPU, in thousandths and bytes. Pure.

A share without a memory of its own takes the same part of the memory as of the GPU. What the driver keeps for itself
must not make the last share impossible, so such a share is content with SHARE_FLOOR of that, and is given what is
left where that is less.
"""

import numpy as np
from numpy.typing import NDArray

from gpuscale.allocator.domain.model import WHOLE, Ask

SHARE_FLOOR = (9, 10)
"""The least part of its nominal memory that a share without a memory of its own accepts, as a fraction."""

MOST_MEMORY = (2**63 - 1) // WHOLE
"""More than any GPU has, in bytes, of which thousandths can be reckoned without running over."""

Ints = NDArray[np.int64]


def milli_of(ask: Ask, total: Ints) -> Ints | int:
    """Thousandths of each GPU of these sizes that the ask takes; an array only where the size decides."""
    if ask.gpu_memory_bytes is None or ask.gpu_milli < WHOLE:
        return ask.gpu_milli
    wanted = min(ask.gpu_memory_bytes, MOST_MEMORY) * WHOLE
    milli: Ints = np.clip(wanted // np.maximum(total, 1), 1, WHOLE)
    return milli


def memory_floor(ask: Ask, total: Ints) -> Ints | int:
    """Bytes of each GPU of these sizes that must be available."""
    if ask.exclusive:
        return ask.min_memory_bytes
    if ask.gpu_memory_bytes is not None:
        return max(ask.min_memory_bytes, ask.gpu_memory_bytes)
    numerator, denominator = SHARE_FLOOR
    nominal = total * ask.gpu_milli // WHOLE
    floor: Ints = np.maximum(ask.min_memory_bytes, nominal * numerator // denominator)
    return floor


def floor_on(ask: Ask, total: int) -> int:
    """Bytes that must be available of one GPU of this size."""
    if ask.gpu_memory_bytes is not None:
        return max(ask.min_memory_bytes, ask.gpu_memory_bytes)
    if ask.gpu_milli >= WHOLE:
        return ask.min_memory_bytes
    numerator, denominator = SHARE_FLOOR
    return max(ask.min_memory_bytes, total * ask.gpu_milli // WHOLE * numerator // denominator)


def milli_on(ask: Ask, total: int | None) -> int:
    """Thousandths of one GPU that the ask takes."""
    if ask.gpu_memory_bytes is None or ask.gpu_milli < WHOLE:
        return ask.gpu_milli
    return min(max(ask.gpu_memory_bytes * WHOLE // max(total or 0, 1), 1), WHOLE)


def memory_on(ask: Ask, total: int | None, available: int | None, free_milli: int) -> int | None:
    """Bytes of one GPU that the ask takes: all of a whole one, else its memory or its part of what is left.

    `free_milli` is what nobody holds of the GPU. Rounded so that the last share takes what is left; where outsiders
    have some of it, never less than what was looked for.
    """
    if ask.exclusive or total is None or available is None:
        return total
    if ask.gpu_memory_bytes is not None:
        return max(ask.min_memory_bytes, ask.gpu_memory_bytes)
    nominal = total * ask.gpu_milli // WHOLE
    return max(floor_on(ask, total), min(nominal, available * ask.gpu_milli // max(free_milli, 1)))
