"""The fleet's state on disk: recordings, health events, and the two coarsest tiers of history.

Only `store` speaks SQL. Begin with `saver`.
"""
