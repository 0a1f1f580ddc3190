"""A model from any layout to any other: the layouts that are written, and how."""
