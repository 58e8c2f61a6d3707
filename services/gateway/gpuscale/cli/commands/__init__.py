"""The commands, one module per topic; `gpuscale.cli.main` maps commands to functions.

A command reads its options, calls the client, and writes with the console. Slow imports (gRPC, the API, YAML) are deferred so that
`--help` is fast: by `gpuscale.cli.deferred`, or by importing inside of commands. Begin with `get`.
"""
