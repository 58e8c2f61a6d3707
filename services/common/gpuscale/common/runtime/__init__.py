"""Basics of every process: tasks, clocks, failpoints, logs, signals.

No network, no database, no caller identity. Begin with `tasks` and `lifecycle`.
"""
