"""Settings from files, the environment and flags, and the frame of a program that is made of them.

Begin with `settings`; `program` runs a service until it is stopped.
"""
