"""The errors that a person can cause or has to hear of, and nothing else.

The command line turns `UsageError` into exit code 2 and the others, met while running, into exit
code 1; every message names the value, the limit and the remedy.
"""


class UsageError(ValueError):
    """What was asked for cannot be done; found before any work starts."""


class CheckpointError(ValueError):
    """A model's files are missing, damaged or disagree with each other."""


class NumericalError(ArithmeticError):
    """The model's numbers are no numbers any more: logits hold nan or infinity."""
