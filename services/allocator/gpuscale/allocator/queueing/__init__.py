"""Waiting for GPUs: the queue of requests that found no room, whose turn it is, and what is kept for whom.

Pure: it decides and carries out nothing (`usecases.reserving` does), and asks a `World` for all it knows. Begin with `queue`.
"""
