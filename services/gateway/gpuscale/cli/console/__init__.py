"""Between commands and the world: the connection to a server, what has a name there, and how results and errors are written.

`command` is what every command is made of; then `session` and `output`. `lookup` and `cells` need the contract, and
are loaded when a command uses them (`gpuscale.cli.deferred`).
"""
