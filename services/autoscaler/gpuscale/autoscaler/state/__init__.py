"""What is on disk: endpoints, replicas, decisions, watchers, what was learnt.

Begin with `store`.
"""
