"""What callers ask for, one module a topic: load, ask the core with the time, save, answer.

No messages of the contract but in `telemetry`, which follows the fleet. Begin with `reserving` and `leases`.
"""
