"""Queues: where brokers are, how they are read, and the watchers that keep reading them."""
