"""Worker adapters: programs that start and stop replicas for the autoscaler, and connect out to it.

Begin with `main`: it finds an engine and joins the other parts. `connection` is the stream to the autoscaler, `crew` the loop that
observes the engine and takes the next steps, `steps` what those are (pure), `engine` what an engine is asked (pure), `journal`
what is on disk. An engine is a folder below `engines`. Nothing here imports one: `main` finds them by their entry points.
"""
