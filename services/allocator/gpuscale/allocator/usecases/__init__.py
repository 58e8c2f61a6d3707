"""What callers ask for and what happens by itself, a module a topic; no SQL. Begin with `reserving` and `leases`."""
