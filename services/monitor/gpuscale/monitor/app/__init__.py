"""The programs: what is made, in which order, and which settings say how. Nothing imports them but `up`."""
