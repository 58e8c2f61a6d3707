"""History: what nodes and GPUs did, in memory, coarser the longer ago it was.

All but `servicer` is pure: times are arguments. Begin with `history`, then `series`.
"""
