"""Completions that follow a grammar: which tokens may come next, as a mask over the vocabulary.

llguidance does the matching; what is here bounds it and makes it agree with our tokenizers. It
knows nothing of logits, requests or ranks.
"""

from parallel_llama.structured.compiler import GrammarCompiler
from parallel_llama.structured.matcher import Matcher, MatchError

__all__ = ["GrammarCompiler", "MatchError", "Matcher"]
