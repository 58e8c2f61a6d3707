"""History: what nodes and GPUs did, in memory, coarser the longer ago it was."""
