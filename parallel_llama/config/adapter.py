"""Finds the tensors of a LoRA adapter that PEFT saved, and checks them against the base model.

Names and shapes are those of transformers' modules, whatever the layout of the base model. A fused
projection has one pair of A and B for all of its weights. If the adapter was trained on a model of
text and images, the modules of the text part have a prefix, and tensors of the other parts are left
out.

Source: get_peft_model_state_dict of peft 0.21.
"""

import hashlib
import os
import re
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from parallel_llama.config.lora import MERGE_WITH_PEFT, LoraConfig, lora_config
from parallel_llama.dtypes import STORED
from parallel_llama.errors import CheckpointError, UsageError, listed
from parallel_llama.families import family_of, parameters, stored_slices
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.families.names import hf_full_name
from parallel_llama.families.weights import Param
from parallel_llama.files.bounded_files import copy_in_memory, expanded, is_file, is_folder
from parallel_llama.files.fields import naming, read_json_object
from parallel_llama.files.model_files import sampled_digest
from parallel_llama.files.safetensors_header import FileTensor, read_safetensors_header

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"

# The largest rank of an adapter that is not merged; vLLM's limit. With a larger rank an adapter
# costs almost as much as the layer itself.
MAX_SERVED_RANK = 512
# Weights that an adapter may change without being merged.
_SERVED = re.compile(
    r"layers\.\d+\.(attention\.w[qkvo]|feed_forward\.(shared_expert\.)?w[123])\.weight"
)
_MERGE = "merge the adapter with reshard --merge-adapter, and run the merged model"

_SAMPLES = 64  # of the weights, for a digest

# The prefix that peft adds to the names of the base model's modules.
_PREFIX = "base_model.model."
_A, _B, _BASE = ".lora_A.weight", ".lora_B.weight", ".base_layer.weight"
# Suffixes of tensors that belong to unsupported settings.
_UNSUPPORTED = {
    ".lora_embedding_A": "LoRA of embeddings",
    ".lora_embedding_B": "LoRA of embeddings",
    ".lora_magnitude_vector": "use_dora",
    ".lora_B.bias": "lora_bias",
}


@dataclass(frozen=True)
class LoraPair:
    """The matrices A [rank, inputs] and B [outputs, rank] of a module; adds scaling * B @ A."""

    a: FileTensor
    b: FileTensor
    scaling: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter that fits a base model.

    Args:
        config: the path of adapter_config.json.
        weights: the path of adapter_model.safetensors.
        args: the merged model, untied if output and embeddings get different weights.
        pairs: the pairs of A and B, by HF's names of the changed tensors.
        whole: the tensors that replace tensors of the base model, by HF's names.
    """

    config: Path
    weights: Path
    args: ModelArgs
    pairs: Mapping[str, LoraPair]
    whole: Mapping[str, FileTensor]


def load_adapter(folder: Path, args: ModelArgs) -> Adapter:
    """The adapter in a folder, for a base model; reads no tensor data.

    Raises: UsageError if the folder has no adapter, or for a setting that is not supported;
    CheckpointError if a file is damaged, or its tensors do not fit the settings or the model.
    """
    _require_files(folder)
    config, weights = folder / CONFIG, folder / WEIGHTS
    values = read_json_object(config)
    with naming(config):
        lora = lora_config(values)
    tensors, is_base, prefix = _tensors(weights, args)
    with naming(config):
        modules = _Modules(lora, _untied(lora, args), is_base, prefix)
    modules.require_fit(weights, tensors)
    pairs = {
        name: LoraPair(tensors[module + _A], tensors[module + _B], modules.scaling(name))
        for name in modules.matrices()
        if (module := name.removesuffix(".weight")) + _A in tensors
    }
    whole = {name: tensors[name] for name in modules.whole()}
    for name in pairs:  # peft saves the output's own weight beside its A and B
        if (output := tensors.get(name.removesuffix(".weight") + _BASE)) is not None:
            whole[name] = output
    return Adapter(config, weights, modules.args, pairs, whole)


def load_served_adapter(folder: Path, args: ModelArgs) -> Adapter:
    """As `load_adapter`, for an adapter that is not merged.

    Raises: as `load_adapter`; UsageError for a rank above MAX_SERVED_RANK, and for modules that an
    adapter can change only by merging.
    """
    adapter = load_adapter(folder, args)
    if adapter.whole:
        raise UsageError(
            f"{folder}: has whole weights: {listed([*adapter.whole])} (of modules_to_save, or an "
            f"output); an adapter that is served has only A and B; {_MERGE}"
        )
    for name, pair in adapter.pairs.items():
        if pair.rank > MAX_SERVED_RANK:
            raise UsageError(
                f"{folder}: {name} has the rank {pair.rank}, over the limit of {MAX_SERVED_RANK} "
                f"for an adapter that is served; {_MERGE}"
            )
    served = {name for _, name in served_pairs(adapter)}
    if others := [name for name in adapter.pairs if name not in served]:
        raise UsageError(
            f"{folder}: has A and B for {listed(others)}; an adapter that is served may change "
            "attention, feed-forward layers and shared experts, but not the output, routers or "
            f"other experts; {_MERGE}"
        )
    return adapter


def load_served_adapters(folders: Mapping[str, str], args: ModelArgs) -> dict[str, Adapter]:
    """The adapters in some folders, by name.

    Raises: as `load_served_adapter`; the message names the adapter.
    """
    adapters = {}
    for name, folder in folders.items():
        try:
            adapters[name] = load_served_adapter(expanded(folder), args)
        except (UsageError, CheckpointError) as error:
            raise type(error)(f"adapter {name!r}: {error}") from error
    return adapters


def kept_in_memory(adapter: Adapter) -> Adapter:
    """The adapter with a copy of its weights, so that they can be read again at any time.

    The folder may be changed or deleted. The copy is freed with the returned adapter.
    """
    descriptor = copy_in_memory(adapter.weights)
    kept = replace(adapter, weights=Path(f"/proc/self/fd/{descriptor}"))
    weakref.finalize(kept, os.close, descriptor)
    return kept


def adapter_digest(adapter: Adapter) -> str:
    """A digest of the settings, and of the size, the start, the end and samples of the weights."""
    digests = sampled_digest(adapter.config, 0), sampled_digest(adapter.weights, _SAMPLES)
    return hashlib.blake2b(repr(digests).encode(), digest_size=32).hexdigest()


def served_pairs(adapter: Adapter) -> Iterator[tuple[Param, str]]:
    """Yields each weight that a served adapter changes, and the name of its pair."""
    slices = stored_slices(adapter.args, "hf")
    for param in parameters(adapter.args):
        name = slices[param.name].name
        if name in adapter.pairs and _SERVED.fullmatch(param.name):
            yield param, name


class _Modules:
    """The modules of a model that an adapter changes.

    `is_base` says that the adapter's names omit the prefix of the base model (`model.`), and
    `prefix` is what they have before the names of the text part.

    Raises: UsageError if the embeddings have A and B, or no module is changed.
    """

    def __init__(self, lora: LoraConfig, args: ModelArgs, is_base: bool, prefix: str) -> None:
        self.args, self._lora, self._is_base, self._prefix = args, lora, is_base, prefix
        slices = stored_slices(args, "hf")
        self._shapes = {slices[p.name].name: slices[p.name].shape for p in parameters(args)}
        self._embedding = slices["tok_embeddings.weight"].name
        self._output = family_of(args).name_in("hf", "output.weight", args)
        # In recent versions of transformers, experts and routers are not linear modules.
        self._expert_matrices = {
            slices[p.name].name
            for p in parameters(args)
            if p.expert is not None or p.name.endswith(".gate.weight")
        }
        if lora.targets is not None and self._is_target(self._embedding):
            raise UsageError(
                f"target_modules names the embeddings {self._module(self._embedding)!r}: LoRA of "
                f"embeddings is not supported; {MERGE_WITH_PEFT}"
            )
        if not any(map(self._is_target, self.matrices())) and not self.whole():
            raise UsageError(
                "target_modules names no linear module of the base model; use the base model that "
                "the adapter was trained for"
            )

    def matrices(self) -> list[str]:
        """The stored tensors that may have A and B."""
        return [
            name
            for name, shape in self._shapes.items()
            if len(shape) == 2 and name.endswith(".weight") and name != self._embedding
        ]

    def whole(self) -> list[str]:
        """The stored tensors of modules in modules_to_save, which were trained whole."""
        return [name for name in self._shapes if self._lora.is_saved(self._module(name))]

    def scaling(self, name: str) -> float:
        """The factor of B @ A of a stored tensor."""
        return self._lora.scaling_of(self._module(name))

    def require_fit(self, path: Path, tensors: Mapping[str, FileTensor]) -> None:
        """Raises: CheckpointError if a tensor is missing, unknown, misshapen, or unreadable."""
        needed, known = self._needed(tensors), self._known()
        parts = {
            "missing": [_PREFIX + name for name in needed if name not in tensors],
            "not named by target_modules or modules_to_save, or not in the base model": [
                repr(tensor.name) for name, tensor in tensors.items() if name not in known
            ],
            "misshapen": [
                f"{tensor.name} is {list(tensor.shape)}, expected {list(known[name])}"
                for name, tensor in tensors.items()
                if known.get(name, tensor.shape) != tensor.shape
            ],
        }
        if faults := [f"{kind}: {listed(names)}" for kind, names in parts.items() if names]:
            raise CheckpointError(
                f"{path}: the tensors do not fit {CONFIG} and the base model; {'; '.join(faults)}; "
                "use the base model that the adapter was trained for, or save the adapter again"
            )
        for tensor in tensors.values():
            if tensor.dtype not in STORED:
                raise CheckpointError(
                    f"{path}: tensor {tensor.name!r:.200} has the dtype {tensor.dtype}; supported: "
                    f"{', '.join(STORED)}"
                )

    def _needed(self, tensors: Mapping[str, FileTensor]) -> list[str]:
        """The tensors that the file must have; an expert has either both A and B or neither."""
        needed = self.whole()
        for name in filter(self._is_target, self.matrices()):
            pair = self._pair_shapes(name)
            if name not in self._expert_matrices or any(tensor in tensors for tensor in pair):
                needed += pair
        return needed

    def _known(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors that the file may have."""
        known = {name: self._shapes[name] for name in self.whole()}
        for name in filter(self._is_target, self.matrices()):
            known |= self._pair_shapes(name)
            known[name.removesuffix(".weight") + _BASE] = self._shapes[name]
        if known and self._lora.keeps_tied and self._output not in self._shapes:
            known[self._output] = self._shapes[self._embedding]  # one weight under two names
        return known

    def _pair_shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """The shapes of A and B of a stored matrix."""
        n_outputs, n_inputs = self._shapes[name]
        module, rank = name.removesuffix(".weight"), self._lora.rank_of(self._module(name))
        return {module + _A: (rank, n_inputs), module + _B: (n_outputs, rank)}

    def _is_target(self, name: str) -> bool:
        if self._lora.targets is None and name == self._output:
            return False
        return self._lora.is_target(self._module(name))

    def _module(self, name: str) -> str:
        """The adapter's name of the module that has a stored tensor."""
        family = family_of(self.args)
        module, short = name.rpartition(".")[0], name.partition(".")[2]
        is_inside = hf_full_name(short, family.names) == name
        if not is_inside and self._prefix != family.text_prefix:
            return module  # the output layer is not inside the base model
        return self._prefix + (module.partition(".")[2] if self._is_base and is_inside else module)


def _untied(lora: LoraConfig, args: ModelArgs) -> ModelArgs:
    """The merged model: untied if the adapter changes the output or the embeddings.

    This is peft's behaviour: it changes one of the two modules that shared a weight.
    """
    if not args.tied_embeddings or lora.keeps_tied:
        return args
    family = family_of(args)
    output, embedding = (
        family.name_in("hf", name, args).removesuffix(".weight")
        for name in ("output.weight", "tok_embeddings.weight")
    )
    is_target = lora.targets is not None and lora.is_target(output)
    is_changed = is_target or lora.is_saved(output) or lora.is_saved(embedding)
    return replace(args, tied_embeddings=False) if is_changed else args


def _require_files(folder: Path) -> None:
    if not is_folder(folder):
        raise UsageError(f"{folder}: not a folder; give the folder that has {CONFIG}")
    if not is_file(folder / CONFIG):
        raise UsageError(f"{folder}: has no {CONFIG}; give the folder that peft saved")
    if is_file(folder / WEIGHTS):
        return
    if is_file(folder / _PICKLED):
        raise UsageError(
            f"{folder}: has {_PICKLED}, which is not read; load it with peft, and save it as "
            f"{WEIGHTS}"
        )
    raise UsageError(f"{folder}: has no {WEIGHTS}; give the folder that peft saved")


def _tensors(path: Path, args: ModelArgs) -> tuple[dict[str, FileTensor], bool, str]:
    """The tensors of the file's text part by full name.

    Returns: also whether the file's names omit the base model's prefix, and the prefix that they
    have before the names of the text part.
    """
    tensors: dict[str, FileTensor] = {}
    family, is_base, text_prefix = family_of(args), False, ""
    for name, tensor in read_safetensors_header(path).items():
        for suffix, setting in _UNSUPPORTED.items():
            if name.endswith((suffix, f"{suffix}.weight")):
                raise UsageError(
                    f"{path}: tensor {name!r:.200} belongs to {setting}, which is not supported; "
                    f"{MERGE_WITH_PEFT}"
                )
        if not name.startswith(_PREFIX):
            raise CheckpointError(
                f"{path}: tensor {name!r:.200} does not begin with {_PREFIX!r}; save the adapter "
                "again with peft"
            )
        short = name.removeprefix(_PREFIX)
        if short.removeprefix("model.").startswith(family.other_parts):
            continue
        prefix = next(filter(short.startswith, family.text_prefixes), "")
        short = short.removeprefix(prefix)
        full = hf_full_name(short, family.names)
        if full in tensors:
            raise CheckpointError(f"{path}: has two tensors for {full!r:.200}; remove one")
        tensors[full], is_base = tensor, is_base or full != short
        text_prefix = text_prefix or prefix
    return tensors, is_base, text_prefix
