"""An OpenAI-compatible HTTP server; the tensor-parallel engine runs in another process."""
