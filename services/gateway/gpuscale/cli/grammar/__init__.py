"""What people may type: nouns, options, sizes and durations, paths, selectors, examples, exit codes.

Nothing here speaks to a server. Begin with `arguments`.
"""
