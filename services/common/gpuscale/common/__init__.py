"""The base of every room. Nothing here knows about GPUs, leases or replicas.

Begin with `errors`; then `rpc` for calls, `store` for state, `security` for callers, `runtime` for tasks and logs, `config`
for settings and programs. `names`, `sizes`, `secrets` and `wire` hold values.
"""

VERSION = "0.2.0.dev0"
"""Same as in pyproject. Reading it with importlib.metadata would cost 3 MB."""
