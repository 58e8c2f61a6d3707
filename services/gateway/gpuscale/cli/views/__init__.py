"""What each kind of resource looks like: columns of tables, and lines in words. Nothing here calls a server or writes.

Modules are named for the service whose resources they show; `backtests` and `decisions` are more than columns.
"""
