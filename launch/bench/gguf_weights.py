"""Writes a model as a float32 GGUF file without a tokenizer, for runtimes that read GGUF."""

from contextlib import closing
from pathlib import Path

import gguf

from parallel_llama.checkpoint import open_checkpoint
from parallel_llama.config import ModelArgs
from parallel_llama.errors import UsageError
from parallel_llama.families import family_of, parameters, stored_places
from parallel_llama.families.model_args import features_of
from parallel_llama.files.model_files import ModelFiles

# Features that llama.cpp derives from the architecture or from the weights.
_SAID = {"family", "wo_bias", "qk_norm"}


def write_gguf(files: ModelFiles, args: ModelArgs, path: Path) -> None:
    """Writes the weights of a model and the sizes of its architecture.

    Raises: UsageError for a model with features beyond its sizes.
    """
    form = family_of(args).gguf
    more = sorted(set(features_of(args)) - _SAID) + ["rope_scaling"] * bool(args.rope_scaling)
    if form is None or more:
        raise UsageError(
            f"a GGUF file is only written for plain models; this one has {more or 'no GGUF form'}"
        )
    writer = gguf.GGUFWriter(path, form.architecture)
    _add_sizes(writer, args)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("no_vocab")
    order = family_of(args).rotary_order["gguf"]
    places = stored_places(args, "gguf")
    with closing(open_checkpoint(files, args)) as checkpoint:
        checkpoint.check(args)
        for param in parameters(args):
            value = checkpoint.read(param, range(param.shape[param.dim]), order)
            writer.add_tensor(places[param.name].name, value.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: gguf.GGUFWriter, args: ModelArgs) -> None:
    """Adds the sizes of a plain model."""
    writer.add_context_length(args.max_seq_len)
    writer.add_embedding_length(args.dim)
    writer.add_block_count(args.n_layers)
    writer.add_feed_forward_length(args.ffn_dim)
    writer.add_head_count(args.n_heads)
    writer.add_head_count_kv(args.n_kv_heads)
    writer.add_key_length(args.head_dim)
    writer.add_value_length(args.head_dim)
    writer.add_rope_dimension_count(args.head_dim)
    writer.add_rope_freq_base(args.rope_theta)
    writer.add_layer_norm_rms_eps(args.norm_eps)
    writer.add_vocab_size(args.vocab_size)
