"""What every room builds on. Nothing here knows of GPUs, leases or replicas.

Begin with `errors`; then `rpc` for calls, `store` for state, `security` for callers, `runtime` for tasks and logs, `config`
for settings and programs. `names`, `sizes`, `secrets` and `wire` are values.
"""

VERSION = "0.1.0"
"""As in pyproject: importlib.metadata, which knows it too, takes 3 MB."""
