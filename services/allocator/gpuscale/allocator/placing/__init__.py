"""Placing: the fleet as arrays, what stands in an ask's way, what each policy prefers, gangs and sets of GPUs."""
