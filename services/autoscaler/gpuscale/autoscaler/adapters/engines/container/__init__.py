"""Replicas as containers of a Docker-compatible engine on one node."""
