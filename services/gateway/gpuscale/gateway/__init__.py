"""The gateway: one address for all services. It forwards bytes to where each of them runs and decodes nothing.

`main` is the program; the forwarder is `common.rpc.forwarder`.
"""
