"""Health of GPUs and nodes: events, recommended actions and quarantines, from facts and times. Pure. Begin with `register`."""
