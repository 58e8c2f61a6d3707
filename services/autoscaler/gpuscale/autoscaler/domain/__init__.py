"""The core: specs, signals, rules, the engine that turns them into decisions, planning, and explanations.

Pure: time is an argument; no wire, clock, loop, log or store. Begin with `engine`, then `rules`.
"""
