"""Health: what is wrong with GPUs and nodes, what to do about it, and which GPUs to keep work away from.

Pure: facts and times in, events and quarantines out. Begin with `register`.
"""
