"""What the fleet has on disk: recordings, and the coarsest tier of history."""
