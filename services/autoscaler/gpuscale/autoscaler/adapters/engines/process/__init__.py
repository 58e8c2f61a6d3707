"""Replicas as processes of this host, which end with the adapter and are adopted after a crash. Begin with `engine`."""
