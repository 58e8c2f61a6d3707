"""The fleet: receives every agent's stream and keeps an index of nodes.

History, recordings and health observe `nodes.Nodes`; nothing here imports them. Begin with `nodes`.
"""
