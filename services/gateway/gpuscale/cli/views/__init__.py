"""What each kind of resource looks like in a table: columns, and nothing else."""
