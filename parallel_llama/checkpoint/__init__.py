"""Reads checkpoints of any layout, or random weights, as the tensors of one rank.

No other package parses torch's own files.
"""
