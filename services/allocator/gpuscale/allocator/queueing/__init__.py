"""The queue: requests that found no room, whose turn it is, and what is kept for whom.

Pure: it decides and carries out nothing (`usecases.reserving` does), and asks a `World` for what it needs. Begin with `queue`.
"""
