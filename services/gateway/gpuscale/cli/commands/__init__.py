"""The commands, a module for each or for those of one topic. `gpuscale.cli.tree` lists them.

A command reads options, calls the client, and writes with the console. Begin with `get`.
"""
