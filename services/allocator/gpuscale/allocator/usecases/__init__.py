"""What callers request and what runs in the background, one module per topic: load, call the core with the time, save, answer.

No messages of the contract but in `fleet`, which follows the fleet, and no SQL. Begin with `reserving` and `leases`.
"""
