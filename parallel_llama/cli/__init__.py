"""The command line: one module per verb, and nothing that the library needs."""
