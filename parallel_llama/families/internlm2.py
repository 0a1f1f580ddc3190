"""InternLM 2 and 2.5: Llama with other names of weights; wq, wk and wv are in one tensor.

Source: InternLM2, arXiv 2403.17297; config.json of internlm/internlm2_5-7b-chat; llama.cpp's
internlm2.
"""

from parallel_llama.families.family import Family, GGUFForm
from parallel_llama.families.names import Names, in_layers

INTERNLM2 = Family(
    name="internlm2",
    models="InternLM 2 and 2.5",
    architecture="InternLM2ForCausalLM",
    base_architecture="InternLM2Model",
    reads=frozenset({"bias"}),
    features=lambda fields: {"attention_bias": fields.flag("bias", True)},
    writes=lambda args: {"bias": args.attention_bias},
    names=(
        Names("tok_embeddings.weight", "model.tok_embeddings.weight", "token_embd.weight"),
        Names("norm.weight", "model.norm.weight", "output_norm.weight"),
        Names("output.weight", "output.weight", "output.weight"),
        *in_layers(
            ("attention_norm.weight", "attention_norm.weight", "attn_norm.weight"),
            ("attention.wq.*", "attention.wqkv.*", "attn_q.*"),
            ("attention.wk.*", "attention.wqkv.*", "attn_k.*"),
            ("attention.wv.*", "attention.wqkv.*", "attn_v.*"),
            ("attention.wo.*", "attention.wo.*", "attn_output.*"),
            ("ffn_norm.weight", "ffn_norm.weight", "ffn_norm.weight"),
            ("feed_forward.w1.*", "feed_forward.w1.*", "ffn_gate.*"),
            ("feed_forward.w2.*", "feed_forward.w2.*", "ffn_down.*"),
            ("feed_forward.w3.*", "feed_forward.w3.*", "ffn_up.*"),
        ),
    ),
    qkv_by_kv_head=frozenset({"hf"}),
    gguf=GGUFForm("internlm2"),
)
