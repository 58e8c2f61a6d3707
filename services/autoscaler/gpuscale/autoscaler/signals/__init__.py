"""Where signals come from: broker queues, Prometheus, the fleet, what programs report.

Each source gives its latest value with its age; none is asked while an endpoint is evaluated. Begin with `sources`.
"""
