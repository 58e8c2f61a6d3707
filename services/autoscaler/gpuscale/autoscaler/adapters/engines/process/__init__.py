"""Replicas as processes of this host, which end with the adapter and are adopted after a crash. Begin with `engine`.

`replica` is the life of one, `processes` what the kernel knows of them, `probes` whether they are well, `logs` their output.
"""
