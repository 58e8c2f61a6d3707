"""Where signals come from: broker queues, Prometheus, the fleet, what programs report.

Each source is a module that gives the latest value with its age. Begin with `sources`; `queues/` reads brokers.
"""
