"""The programs: what is made, in which order, and which settings say how.

One module composes the agent, one the fleet, one `/metrics`; the `*_main` modules are the entry points.
"""
