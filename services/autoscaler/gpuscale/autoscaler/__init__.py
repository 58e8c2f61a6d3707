"""The autoscaler: signals in, decisions with their reasons out, replicas driven to match through worker adapters."""
