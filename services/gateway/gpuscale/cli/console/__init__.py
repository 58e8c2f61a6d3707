"""Between commands and the world: the connection to a server, what has a name there, and how results and errors are written.

`command` is what every command is made of; then `session` and `output`. `resources` and `cells` need the contract, and are
slow to import: commands import them when they run.
"""
