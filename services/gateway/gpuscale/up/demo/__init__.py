"""`gpuscalectl up --demo`: real services for a simulated site of hosts, people and workers.

Begin with `app`: people, endpoints and incidents. `hosts` reports readings like agents, and runs replicas like adapters. The seed
determines loads, names and times; the demo's day can run faster than real time.
"""
