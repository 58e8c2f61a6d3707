"""Replicas as processes of this host, which end with the adapter and are adopted after a crash. Begin with `engine`.

`replica` is the life of one with its health checks and its output, `processes` the kernel's view.
"""
