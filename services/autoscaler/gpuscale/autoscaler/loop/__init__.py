"""The loop that makes endpoints what they should be: evaluate, reserve, start, drain, release.

Begin with `reconciler`, then `passes` and `acting`; `hub` speaks to adapters.
"""
