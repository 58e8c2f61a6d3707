"""Nodes, GPUs, readings, events, recordings as plain values of agent and fleet. Pure. Begin with `readings`."""
