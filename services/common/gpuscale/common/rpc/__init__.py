"""Servers and channels: everything between the wire and a servicer, and between a client and the wire.

Begin with `interceptor` for incoming calls, `channel` for outgoing ones.
"""
