"""What callers ask for and what happens by itself, one module a topic: load, ask the core with the time, save, answer.

No messages of the contract but in `fleet`, which follows the fleet, and no SQL. Begin with `reserving` and `leases`.
"""
