"""The fleet: takes in every agent's stream and knows every node from it.

Who wants to know of snapshots observes `nodes.Nodes`; history, recording and health do, and nothing here knows them.
Begin with `nodes`.
"""
