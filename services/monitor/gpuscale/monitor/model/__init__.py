"""Plain values of agent and fleet: nodes, GPUs, readings, recordings and metrics. Pure. Begin with `readings`."""
