"""The Kubernetes adapter: replicas are pods of a Deployment that the operator made, or pods of their own."""
