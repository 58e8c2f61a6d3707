"""Settings from files, the environment and flags, and the frame of a program that is made of them.

Begin with `settings`; `sources` reads what they are made of.
"""
