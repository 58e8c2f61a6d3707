"""What commands share: options, the connection to a server, lookup of resources, output and errors.

Begin with `command`, whose `Session` each command gets, then `output`. `lookup` and `cells` need the contract and are loaded when a command uses
them (`gpuscale.cli.deferred`).
"""
