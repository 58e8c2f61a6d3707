"""State: SQLite by default, PostgreSQL by URL, one writer, leader election. Each room brings its own schema. Begin with `store`."""
