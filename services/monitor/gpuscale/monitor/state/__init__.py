"""What the fleet has on disk: recordings, health events, the two coarsest tiers of history. Begin with `saver`."""
