"""The adapter of Slurm: every replica is a batch job."""
