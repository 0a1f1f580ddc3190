"""The command line, one module per command. The library does not depend on it."""
