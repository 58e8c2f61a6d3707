"""Replicas as actors of a Ray cluster. Begin with `engine`.

`driver` is a process of its own, which alone imports Ray; `messages` is what the two say to each other (pure), and `runner` the
actor, whose code travels to Ray's nodes.
"""
