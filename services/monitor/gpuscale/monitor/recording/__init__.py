"""Recordings: what GPUs did between two moments, as minimum, maximum, mean and count of samples.

`samples` feeds history as well. `recordings` is pure. Begin with `recordings`.
"""
