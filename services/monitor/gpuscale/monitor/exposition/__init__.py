"""What the agent and the fleet show to Prometheus, and the HTTP server that shows it."""
