"""State: SQLite by default, PostgreSQL by URL, one writer, and which process leads.

The rooms bring their schemas; nothing here knows what they store. Begin with `store`.
"""
