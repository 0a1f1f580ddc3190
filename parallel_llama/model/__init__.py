"""The transformer, as one rank sees it."""
