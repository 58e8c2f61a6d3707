"""The contract's services and what they change: endpoints, rules, watchers, metrics, decisions, backtests.

Begin with `endpoint_servicer` and `endpoints`.
"""
