"""Replicas as processes of this host, which end with the adapter and are adopted after a crash. Begin with `engine`.

`replica` is the life of one, `processes` the kernel's view, `probes` the health checks, `logs` the output.
"""
