"""Waiting for GPUs: the queue of requests that found no room, whose turn it is, and what is kept for whom."""
