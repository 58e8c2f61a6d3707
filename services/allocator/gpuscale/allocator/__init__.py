"""The allocator: grants, renews and ends GPU reservations, and never loses one that it has acknowledged."""
