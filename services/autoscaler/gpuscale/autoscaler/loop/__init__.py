"""The control loop of endpoints: evaluate, reserve, start, drain, release.

Only this package gives orders to adapters and the allocator. Begin with `reconciler`, then `leases`.
"""
