"""What every process needs: tasks, clocks and failpoints, logs, signals.

No network, no database, no identity of callers. Begin with `tasks` and `lifecycle`.
"""
