"""The core: specs, signals, rules, the engine that decides by them, planning. Pure. Begin with `engine`, then `rules`."""
