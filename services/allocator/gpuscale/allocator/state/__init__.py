"""What is on disk: SQL is spoken only here. Begin with `store`; `commits` is the second half of each change."""
