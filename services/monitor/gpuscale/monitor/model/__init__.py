"""Plain values of agent and fleet: nodes, GPUs, readings, health events, recordings and metrics. Pure.

Begin with `readings`.
"""
