"""The core: specs, signals, rules, the engine that makes a decision of them, planning, and explanations.

Pure: time comes in as an argument; no wire, clock, loop, log or store. Begin with `engine`, then `rules`.
"""
