"""Replicas as pods: of a Deployment that is scaled, or made one by one (`bare`). Begin with `engine`.

`pods` says which pod is which replica (pure); `cluster` holds the calls of the Kubernetes API.
"""
