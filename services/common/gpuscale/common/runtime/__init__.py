"""What every process needs: clocks, tasks and their scopes, logs, failpoints, signals.

No network, no database, no identity of callers. Begin with `tasks` and `lifecycle`.
"""
