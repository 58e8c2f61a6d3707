"""Between these values and the contract's messages: snapshots, deltas, recordings.

No gRPC calls here. Begin with `merging`.
"""
