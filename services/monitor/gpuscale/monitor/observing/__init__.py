"""From snapshots to samples and facts, for `history`, `recording`, `health`. Begin with `samples` and `health_watch`."""
