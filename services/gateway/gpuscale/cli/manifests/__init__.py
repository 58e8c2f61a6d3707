"""Files of endpoints and watchers: read with positions, held against the contract, planned and applied.

Begin with `documents`, then `planning`.
"""
