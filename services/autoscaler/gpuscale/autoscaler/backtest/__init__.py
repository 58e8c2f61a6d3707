"""Backtest: the engine itself on a recorded workload, with its own clock. Pure. Begin with `simulate`."""
