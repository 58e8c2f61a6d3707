"""Where signals other than queues get their values: the fleet, reports, Prometheus, and the allocator's queue."""
