"""Sources of signals: broker queues, Prometheus, the fleet, reported metrics.

Each source has its latest value with its age; none is called during an evaluation. Begin with `sources`.
"""
