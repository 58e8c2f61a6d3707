"""Conversions between the values of `model` and messages. No gRPC calls. Begin with `snapshots`, then `merging`."""
