"""History: what nodes and GPUs did, in memory, in coarser steps the longer ago it was.

Pure: times are arguments. Begin with `history`, then `series`.
"""
