"""Observers that turn the fleet's snapshots into samples and health facts, and the services of history, recordings and health.

The rules are in `history`, `recording` and `health`, which are pure. Begin with `samples` and `health_servicer`.
"""
