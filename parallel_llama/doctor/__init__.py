"""Checks of hosts and ranks; each result has an id, the values seen, and a remedy."""
