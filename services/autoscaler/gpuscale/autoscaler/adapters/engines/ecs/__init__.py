"""The adapter of Amazon ECS: every replica is a task."""
