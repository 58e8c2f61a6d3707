"""The state on disk, how groups of changes are written, and what proves it intact at start.

Only this package uses SQL, and it decides nothing. Begin with `store`; `commits` is the second half of each change.
"""
