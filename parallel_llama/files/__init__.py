"""Untrusted files: bounded readers of their headers, and the files of a model. No torch."""
