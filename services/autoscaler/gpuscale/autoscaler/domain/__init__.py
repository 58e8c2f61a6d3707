"""The core: signals, rules, policies, the engine that makes a decision of them, and explanations.

Pure: time comes in as an argument; no wire, clock, loop, log or store. Begin with `engine`.
"""
