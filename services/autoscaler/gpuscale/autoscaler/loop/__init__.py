"""The loop that makes endpoints what they should be: evaluate, reserve, start, drain, release.

Only here are adapters and the allocator told something. Begin with `reconciler`, then `leases`.
"""
