"""Health: what is wrong with GPUs and nodes, and which to keep work away from. Pure. Begin with `register`."""
