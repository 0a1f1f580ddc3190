"""Checks of hosts and ranks that a model needs: each with an id, what was seen, and a cure."""
