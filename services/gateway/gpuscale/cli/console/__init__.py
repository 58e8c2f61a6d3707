"""The session with a server, and how results, notes, progress and errors are written.

Begin with `session` and `output`; `resources` reads what has a name.
"""
