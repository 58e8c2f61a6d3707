"""What people may type: kinds of resources, sizes and durations, paths, selectors and output formats.

Nothing here speaks to a server or knows a message of the contract. Begin with `nouns` and `parameters`.
"""
