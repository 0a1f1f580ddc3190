"""Grammar-constrained decoding: the mask of tokens that may come next.

llguidance does the matching; this package bounds its cost and adapts it to our tokenizers. Nothing
here depends on logits, requests or ranks.
"""
