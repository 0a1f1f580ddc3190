"""Sampling tokens and scoring them, from the logits of all ranks."""
