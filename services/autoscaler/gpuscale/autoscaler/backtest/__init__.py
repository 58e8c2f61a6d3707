"""Backtest: the engine itself on a recorded workload, with a clock of its own. Pure. Begin with `simulate`."""
