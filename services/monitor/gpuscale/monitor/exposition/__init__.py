"""What the agent and the fleet show to Prometheus; the HTTP server is common's `rpc.metrics_http`.

Begin with `series`, the names as data, then `agent` and `fleet`, the two pages.
"""
