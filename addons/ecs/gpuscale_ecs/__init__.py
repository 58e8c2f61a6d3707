"""Replicas as tasks of Amazon ECS. Begin with `engine`; `tasks` is pure, and `client` alone knows boto3."""
