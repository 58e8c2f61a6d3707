"""A floor of this room."""
