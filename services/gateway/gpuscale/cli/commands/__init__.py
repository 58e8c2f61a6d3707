"""The commands, a module for each topic; `gpuscale.cli.tree` says which function is which command.

A command reads its options, calls the client, and writes with the console. What is slow to import (gRPC, the contract, YAML)
is loaded when it is used, so that `--help` is quick: modules of `gpuscale.cli.deferred` by themselves, others are imported inside of
commands. Begin with `get`.
"""
