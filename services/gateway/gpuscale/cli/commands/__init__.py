"""The commands, a module for each topic; `gpuscale.cli.tree` says which function is which command.

A command reads its options, calls the client, and writes with the console. What is slow to import (gRPC, the contract, YAML)
is imported inside of commands, so that `--help` is quick. Begin with `get`.
"""
