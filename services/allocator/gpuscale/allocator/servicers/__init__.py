"""The contract's services: messages to values, one use case, values to messages; no decisions. Begin with `servicer`."""
