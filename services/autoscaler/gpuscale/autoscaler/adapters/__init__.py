"""Worker adapters: programs that start and stop replicas for the autoscaler, and connect out to it.

Begin with `main`: it finds an engine and connects the other parts. `connection` is the stream to the autoscaler, `crew` the
control loop, `steps` plans its steps (pure), `engine` is the interface to an engine (pure), `journal` the state on disk. An
engine is a folder below `engines`. Nothing here imports one: `main` finds them by their entry points.
"""
