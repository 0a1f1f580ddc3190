"""OLMo 2: norms after attention and feed-forward alone, and of queries and keys of all heads.

Source: Olmo2Config of transformers 5.24; arXiv 2501.00656; llama.cpp's olmo2.
"""

from parallel_llama.families.family import HALF_IN_GGUF, Family, GGUFForm
from parallel_llama.families.names import POST_NORM_NAMES, QK_NORM_NAMES, names_with

_NORMS = {
    "qk_norm": True,
    "qk_norm_across_heads": True,
    "pre_norms": False,
    "post_norms": True,
}

OLMO2 = Family(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    base_architecture="Olmo2Model",
    reads=frozenset({"attention_bias"}),
    features=lambda fields: {**_NORMS, "attention_bias": fields.flag("attention_bias", False)},
    writes=lambda args: {"attention_bias": args.attention_bias},
    defaults={"norm_eps": 1e-5},
    names=names_with(*POST_NORM_NAMES, *QK_NORM_NAMES),
    gguf=GGUFForm("olmo2", lambda *_: _NORMS),
    rotary_order=HALF_IN_GGUF,
)
