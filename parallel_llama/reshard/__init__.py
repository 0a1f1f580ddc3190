"""Converts a model from any layout to another."""
