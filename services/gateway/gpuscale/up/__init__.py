"""`gpuscalectl up`: every service on one server, in one process. Composes the rooms, with no logic of its own.

Begin with `app`, which opens the parts in order. `settings` reads one file for all parts; `main` is the program; `demo` simulates a site.
"""
