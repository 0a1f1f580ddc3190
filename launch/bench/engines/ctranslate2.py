"""CTranslate2: `generate_batch` and `score_batch`, with token ids as token names."""

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ctranslate2
import gguf
import numpy as np
from ctranslate2.specs import common_spec, transformer_spec

from launch.bench.engines import Measurement, Setup

VERSIONS = {"ctranslate2": ctranslate2.__version__}

_OF_A_LAYER = (
    "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output",
    "ffn_norm", "ffn_gate", "ffn_up", "ffn_down",
)  # fmt: skip


def convert(source: Path, target: Path, form: str) -> None:
    """Converts a float32 GGUF file of Llama's architecture to a folder of CTranslate2."""
    reader = gguf.GGUFReader(source)
    weights = {each.name: np.array(each.data) for each in reader.tensors}
    spec = _spec({key: field.contents() for key, field in reader.fields.items()})
    spec.register_vocabulary([str(token) for token in range(len(weights["token_embd.weight"]))])
    _fill(spec.decoder, weights)
    spec.validate()
    spec.optimize(quantization=None if form == "float32" else form)
    target.mkdir()
    spec.save(str(target))


def _spec(header: Mapping[str, Any]) -> Any:
    own = {key.removeprefix("llama."): value for key, value in header.items()}
    if header["general.architecture"] != "llama":
        raise SystemExit(f"the architecture {header['general.architecture']} is not supported")
    spec = transformer_spec.TransformerDecoderModelSpec.from_config(
        own["block_count"],
        own["attention.head_count"],
        activation=common_spec.Activation.SWISH,
        pre_norm=True,
        ffn_glu=True,
        rms_norm=True,
        rotary_dim=0,
        rotary_interleave=True,
        rotary_base=own["rope.freq_base"],
        num_heads_kv=own["attention.head_count_kv"],
        head_dim=own["attention.key_length"],
    )
    spec.decoder.scale_embeddings = False
    spec.config.layer_norm_epsilon = own["attention.layer_norm_rms_epsilon"]
    # CTranslate2 requires these tokens. They have no effect, because end-of-text is ignored.
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = "0"
    return spec


def _fill(decoder: Any, weights: dict[str, np.ndarray]) -> None:
    """Assigns every weight to the model; refuses unknown weights."""
    embeddings = weights.pop("token_embd.weight")
    decoder.embeddings.weight = embeddings
    decoder.layer_norm.gamma = weights.pop("output_norm.weight")
    decoder.projection.weight = weights.pop("output.weight", embeddings)
    for number, layer in enumerate(decoder.layer):
        own = {name: weights.pop(f"blk.{number}.{name}.weight") for name in _OF_A_LAYER}
        attention, ffn = layer.self_attention, layer.ffn
        attention.layer_norm.gamma = own["attn_norm"]
        attention.linear[0].weight = np.concatenate([own["attn_q"], own["attn_k"], own["attn_v"]])
        attention.linear[1].weight = own["attn_output"]
        ffn.layer_norm.gamma = own["ffn_norm"]
        ffn.linear_0.weight = own["ffn_gate"]
        ffn.linear_0_noact.weight = own["ffn_up"]
        ffn.linear_1.weight = own["ffn_down"]
    if weights:
        raise SystemExit(f"unknown weight {next(iter(weights))}")


class CTranslate2:
    def __init__(self, setup: Setup) -> None:
        self.generator = ctranslate2.Generator(
            setup.model,
            device="cpu",
            compute_type=setup.form,
            inter_threads=1,
            intra_threads=setup.n_threads,
        )

    def answer(self, prompts: Sequence[Sequence[int]], n_new: int) -> Measurement:
        first_s = 0.0

        def note(_: Any) -> bool:
            nonlocal first_s
            first_s = first_s or time.perf_counter()
            return False

        started = time.perf_counter()
        results = self.generator.generate_batch(
            [list(map(str, prompt)) for prompt in prompts],
            max_length=n_new,
            sampling_topk=1,
            include_prompt_in_result=False,
            end_token=[],
            callback=note,
        )
        total_s = time.perf_counter() - started
        tokens = [list(map(int, result.sequences_ids[0])) for result in results]
        return Measurement(tokens, first_s - started, total_s)

    def nll(self, tokens: Sequence[int]) -> float:
        (result,) = self.generator.score_batch([list(map(str, tokens))])
        return -statistics.fmean(result.log_probs)


load = CTranslate2
