"""History: what nodes and GPUs did, in memory, in coarser steps the longer ago. Pure. Begin with `history`."""
