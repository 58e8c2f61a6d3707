"""The fleet's state on disk: recordings, health events, and the coarsest tier of history. Only `store` speaks SQL. Begin with `saver`."""
