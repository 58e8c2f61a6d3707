"""Recordings: what GPUs did between two moments, as minimum, maximum, mean and count of samples. Pure."""
