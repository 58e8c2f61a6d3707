"""What the agent and the fleet show to Prometheus; the HTTP server is common's `rpc.metrics_http`.

Begin with `agent` and `fleet`, the two pages; the names are data in `model.prometheus`.
"""
