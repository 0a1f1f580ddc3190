"""From requests to tokens: continuous batching over a paged KV cache, alike on every rank."""
