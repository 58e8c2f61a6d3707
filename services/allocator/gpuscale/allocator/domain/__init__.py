"""The core: reservations, leases, fences, cordons, what stands in a GPU's way, and what a GPU is worth.

Pure: time comes in as an argument, answers carry their reasons; no wire, clock, loop, log or store. Begin with `ledger`.
"""
