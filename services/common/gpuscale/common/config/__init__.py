"""Settings from flags, the environment and a file, and what a program builds from them. Begin with `settings`; `sources` reads the values."""
