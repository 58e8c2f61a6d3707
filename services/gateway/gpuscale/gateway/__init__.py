"""The gateway: one address for every service, forwarding bytes to where each of them runs. It decodes nothing.

Begin with `forwarder`: how a call of any kind passes. `upstreams` says which service runs where, `main` is the program.
"""
