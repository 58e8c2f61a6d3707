"""The autoscaler: turns signals into decisions with reasons, and drives replicas to match through worker adapters."""
