"""What the agent and the fleet show to Prometheus: two pages, `agent` and `fleet`; names are in `model.prometheus`."""
