"""Well-known families that are not supported, by HF's model_type, and why."""

_ALIBI = "its position biases (ALiBi) are not computed"
_LEARNED = "its learned position embeddings are not computed"
_LATENT = "its latent attention (MLA) is not computed"
_SHARED = "its shared experts, to which every token is sent, are not computed"
_STATE = "its state-space layers (SSM) are not computed"
_FIRST_FALCON = "use the newer config.json of Falcon, which has model_type 'falcon'"
_IMAGES = "it is a model of text and images, and only text models are supported"
MISSING = {
    **dict.fromkeys(("bloom", "mpt", "baichuan"), _ALIBI),
    **dict.fromkeys(("gpt2", "gpt_bigcode", "opt"), _LEARNED),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "minicpm3"), _LATENT),
    **dict.fromkeys(("qwen2_moe", "glm4_moe", "ernie4_5_moe", "granitemoeshared"), _SHARED),
    **dict.fromkeys(("mamba", "mamba2", "jamba", "falcon_h1", "falcon_mamba", "zamba2"), _STATE),
    **dict.fromkeys(("llava", "mllama", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"), _IMAGES),
    **dict.fromkeys(("RefinedWeb", "RefinedWebModel"), _FIRST_FALCON),
    "gemma3": f"{_IMAGES}; use a text-only form of it (gemma3_text)",
    "t5": "it has an encoder, and only decoders are supported",
}
