"""What users type: kinds of resources, sizes and durations, paths, selectors and output formats.

Nothing here calls a server or knows the contract's messages. Begin with `nouns` and `parameters`.
"""
