"""Servers and channels: what happens to a call between the wire and a servicer, and between a client and the wire.

Begin with `interceptor` for a call that comes in, `channel` for one that goes out.
"""
