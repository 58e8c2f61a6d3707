"""Between the values of `model` and the contract's messages. No gRPC calls. Begin with `snapshots`, then `merging`."""
