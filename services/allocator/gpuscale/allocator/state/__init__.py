"""What is on disk, how changes get there in groups, and what proves at the start that it is whole.

Begin with `store`; `commits` is the second half of each change.
"""
