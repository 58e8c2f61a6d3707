"""Replicas as batch jobs of Slurm. Begin with `engine`; `jobs` says what a job is called with and what its state means (pure)."""
