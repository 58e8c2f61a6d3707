"""Waiting for GPUs: whose turn it is, what is kept for whom. Pure: it carries out nothing. Begin with `queue`."""
