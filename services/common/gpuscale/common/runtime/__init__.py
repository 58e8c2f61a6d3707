"""What every process needs: clocks, tasks and their scopes, logs, locks, failpoints, changes that are not interrupted.

No network, no database, no identity of callers. Begin with `lifecycle` (tasks) and `uninterrupted` (write, then memory).
"""
