"""From requests to tokens: continuous batching over a paged KV cache, identically on every rank."""
