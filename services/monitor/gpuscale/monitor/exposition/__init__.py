"""The `/metrics` pages of agent and fleet. `common.rpc.metrics_http` serves them.

Begin with `agent` and `fleet`, the two pages; names are data in `model.prometheus`.
"""
