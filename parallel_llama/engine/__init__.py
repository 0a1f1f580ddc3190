"""Continuous batching over a paged KV cache; every rank runs the same steps."""
