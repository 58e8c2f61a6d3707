"""`gpuscalectl up`: every service on one server, in one process. It composes the rooms and has no logic of its own.

Begin with `app`: what is opened in which order. `settings` makes one file serve all parts, `main` is the program.
"""
