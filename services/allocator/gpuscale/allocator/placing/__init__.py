"""Which GPUs an ask gets, what each policy prefers, and why not. Pure. Begin with `placer`; rules are in `constraints`."""
