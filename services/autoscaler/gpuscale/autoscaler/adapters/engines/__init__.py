"""Adapters for engines that keep replicas themselves: what they share, and a package for each engine."""
