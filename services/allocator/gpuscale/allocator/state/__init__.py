"""What is on disk, how changes get there in groups, and what proves at the start that it is whole.

Only here is SQL spoken, and nothing is decided. Begin with `store`; `commits` is the second half of each change.
"""
