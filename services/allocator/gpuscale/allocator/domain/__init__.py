"""The core: reservations, leases, fences, cordons, use policies, power budgets and estimates.

Pure: time is an argument, answers carry reasons; no wire, clock, loop, log or store. Begin with `ledger`.
"""
