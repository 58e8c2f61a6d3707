"""History of nodes and GPUs, in memory, with coarser steps for older samples. Pure. Begin with `history`."""
