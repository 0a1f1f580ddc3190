"""Writes `ModelArgs` as the fields of a GGUF header, the inverse of `config.gguf`.

Source: ggml's docs/gguf.md; llama.cpp's convert_hf_to_gguf.py.
"""

import struct
from dataclasses import asdict, fields, replace
from typing import Any

from parallel_llama.errors import UsageError
from parallel_llama.families import FAMILIES, family_of
from parallel_llama.families.family import GGUFForm
from parallel_llama.families.model_args import ModelArgs, RopeScaling

# Arguments that a file does not state: the dtype is that of the tensors, and llama.cpp has one name
# for several families.
_NOT_STATED = "dtype", "family"


def written_form(args: ModelArgs) -> GGUFForm:
    """The form of a model's family in GGUF files.

    Raises: UsageError for a family that is not written.
    """
    form = family_of(args).gguf
    if form is None or form.writes is None:
        written = [name for name, family in FAMILIES.items() if family.gguf and family.gguf.writes]
        raise UsageError(
            f"{args.family!r} models cannot be written as GGUF; supported: {', '.join(written)}; "
            "use --format hf or native"
        )
    return form


def gguf_fields(args: ModelArgs) -> dict[str, Any]:
    """The fields of a header that state a model's arguments.

    Raises: UsageError for a family that is not written.
    """
    form = written_form(args)
    assert form.writes is not None
    kind = "" if form.has_layer_norm else "rms_"
    fields_of_arch = {
        "vocab_size": args.vocab_size,
        "context_length": args.max_seq_len,
        "embedding_length": args.dim,
        "block_count": args.n_layers,
        "feed_forward_length": args.ffn_dim,
        "attention.head_count": args.n_heads,
        "attention.head_count_kv": args.n_kv_heads,
        "attention.key_length": args.head_dim,
        "attention.value_length": args.head_dim,
        f"attention.layer_norm_{kind}epsilon": float(args.norm_eps),
        "rope.dimension_count": args.rotary_dim or args.head_dim,
        "rope.freq_base": float(args.rope_theta),
        **_scaling_fields(written_scaling(args)),
    }
    if args.n_experts:
        fields_of_arch |= {
            "expert_count": args.n_experts,
            "expert_used_count": args.n_active_experts,
        }
    fields_of_arch |= form.writes(args)
    arch = form.architecture
    return {"general.architecture": arch} | {
        f"{arch}.{key}": value for key, value in fields_of_arch.items()
    }


def written_scaling(args: ModelArgs) -> RopeScaling | None:
    """The rope scaling of the file; llama3 scaling becomes a factor for each frequency."""
    scaling = args.rope_scaling
    if scaling is None or scaling.kind != "llama3":
        return scaling
    factors = scaling.llama3_factors(args.rope_theta, args.head_dim)
    return RopeScaling("factors", factors=tuple(map(_as_float32, factors)))


def require_equal(args: ModelArgs, read: ModelArgs) -> None:
    """Compare a model's arguments with those read back from the header that was written for it.

    Raises: UsageError that names the arguments that a file of this architecture cannot state.
    """
    written, read_back = (
        {field.name: _comparable(getattr(model, field.name)) for field in fields(model)}
        for model in (replace(args, rope_scaling=written_scaling(args)), read)
    )
    lost = [
        name for name in written if name not in _NOT_STATED and written[name] != read_back[name]
    ]
    if lost:
        shown_args = ", ".join(f"{name}={getattr(args, name)!s:.80}" for name in lost)
        raise UsageError(
            f"{shown_args}: a GGUF file of the architecture {written_form(args).architecture!r} "
            "cannot state this; use --format hf or native"
        )


def _scaling_fields(scaling: RopeScaling | None) -> dict[str, Any]:
    if scaling is None or scaling.kind not in ("linear", "yarn"):
        return {}
    rope_fields: dict[str, Any] = {
        "rope.scaling.type": scaling.kind,
        "rope.scaling.factor": float(scaling.factor),
    }
    if scaling.kind == "yarn":
        rope_fields |= {
            "rope.scaling.original_context_length": scaling.original_max_seq_len,
            "rope.scaling.yarn_beta_fast": float(scaling.beta_fast),
            "rope.scaling.yarn_beta_slow": float(scaling.beta_slow),
        }
        if scaling.attention_factor is not None:
            rope_fields["rope.scaling.yarn_attn_factor"] = float(scaling.attention_factor)
    return rope_fields


def _comparable(value: Any) -> Any:
    """A value with its floats in the precision of a header."""
    if isinstance(value, RopeScaling):
        return {key: _comparable(each) for key, each in asdict(value).items()}
    if isinstance(value, tuple):
        return tuple(map(_comparable, value))
    return _as_float32(value) if isinstance(value, float) else value


def _as_float32(value: float) -> float:
    single: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return single
