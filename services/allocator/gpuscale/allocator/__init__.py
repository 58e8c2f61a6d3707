"""The allocator: grants, renews and ends reservations of GPUs, and forgets none that it acknowledged."""
