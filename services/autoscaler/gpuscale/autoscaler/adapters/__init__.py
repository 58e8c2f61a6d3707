"""Worker adapters: programs that start and stop replicas for the autoscaler, and connect out to it."""
