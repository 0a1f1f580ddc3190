"""An OpenAI-compatible HTTP server before the tensor-parallel engine, which is another process."""
