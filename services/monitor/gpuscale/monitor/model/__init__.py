"""Nodes, GPUs and their readings, health events, recordings and metrics, as plain values.

Pure: no wire, clock, loop, log, driver or store. Both the agent and the fleet speak in these. Begin with `readings`.
"""
