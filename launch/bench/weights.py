"""Provides the weights of a model to every engine in the format that it loads."""

import subprocess
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import gguf

from launch.bench.engines import Layout, Runtime
from launch.bench.worker import ROOT, RuntimeFailed
from parallel_llama.checkpoint.reading import open_checkpoint
from parallel_llama.dtypes import QUANTS, Precision
from parallel_llama.errors import UsageError
from parallel_llama.families import family_of, parameters, stored_slices
from parallel_llama.families.model_args import ModelArgs, features_of
from parallel_llama.files.model_files import ModelFiles
from parallel_llama.memory import bytes_passed_over, values_by_form, weight_bytes
from parallel_llama.plan import make_plan
from parallel_llama.reshard.reshard import reshard

# Features that llama.cpp derives from the architecture or from the weights.
_SAID = {"family", "wo_bias", "qk_norm"}


@dataclass(frozen=True)
class Weights:
    """The files of a model, and a `folder` for converted files."""

    files: ModelFiles
    args: ModelArgs
    folder: Path

    def path(self, engine: Runtime) -> Path:
        """The path that an engine loads; the weights are converted at the first call.

        Raises: RuntimeFailed if the conversion fails.
        """
        if engine.shares is not None:
            return self.path(engine.shares)
        base = self._base(engine.layout)
        if not engine.makes:
            return base
        target = self.folder / f"{engine.module}-{engine.form}{engine.makes}"
        if not target.exists():
            assert engine.python is not None
            arguments = [engine.module, str(base), str(target), engine.form]
            command = [engine.python, "-m", "launch.bench.worker", *arguments]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            if done.returncode:
                lines = (done.stderr.strip() or "no message").splitlines()
                raise RuntimeFailed(f"its weights could not be converted: {lines[-1]}")
        return target

    def step_bytes(self, engine: Runtime, batch: int) -> int:
        """Bytes of weights that one decode step of `batch` sequences must read.

        For converted files it is the size of the file times the fraction of values that are read.
        """
        if engine.shares is not None:
            return self.step_bytes(engine.shares, batch)
        precision = _precision(engine)
        whole = weight_bytes(
            make_plan(self.args, 1).shards[0], values_by_form(self.args, precision)
        )
        read = whole - bytes_passed_over(self.args, batch, precision)
        return round(_size(self.path(engine)) * read / whole) if engine.makes else read

    def _base(self, layout: Layout) -> Path:
        """The float32 model in a layout, written at the first call."""
        target = self.folder / layout
        if target.exists():
            return target
        if layout != "gguf":
            reshard(self.files, target, layout=layout, n_parts=1, dtype="float32")
            return target
        try:
            write_gguf(self.files, self.args, target)
        except UsageError as error:
            raise RuntimeFailed(str(error)) from error
        return target


def _precision(engine: Runtime) -> Precision:
    """The precision of weights in memory; float32 for converted files, whatever their format."""
    if engine.makes:
        return Precision.plain("float32")
    if engine.form in QUANTS:
        return Precision.on("cpu", "float32", engine.form)
    return Precision.on("cpu", engine.form)


def _size(path: Path) -> int:
    """The size of the file with the weights, which is in a folder for CTranslate2."""
    return (path / "model.bin" if path.is_dir() else path).stat().st_size


def write_gguf(files: ModelFiles, args: ModelArgs, path: Path) -> None:
    """Writes the weights of a model and the sizes of its architecture.

    Raises: UsageError for a model that its sizes alone do not describe.
    """
    form = family_of(args).gguf
    more = sorted(set(features_of(args)) - _SAID) + ["rope_scaling"] * bool(args.rope_scaling)
    if form is None or more:
        raise UsageError(
            "a GGUF file is only written for plain models; "
            f"this one has {', '.join(more) or 'no GGUF form'}"
        )
    writer = gguf.GGUFWriter(path, form.architecture)
    _add_sizes(writer, args)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("no_vocab")
    order = family_of(args).rotary_order["gguf"]
    places = stored_slices(args, "gguf")
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
