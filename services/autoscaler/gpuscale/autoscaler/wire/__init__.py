"""Conversion between the core's values and the contract's messages; no rules and no state. Begin with `specs`."""
