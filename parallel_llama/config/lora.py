"""Reads the settings of a LoRA adapter from PEFT's adapter_config.json.

Settings that would change the merged weights, but are not implemented, are refused. Unknown
settings are accepted only with a value that switches them off.

Source: LoRA, arXiv 2106.09685, section 4.1; rsLoRA, arXiv 2312.03732; LoraConfig of peft 0.21.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from parallel_llama.config.patterns import compiled_pattern, repeats
from parallel_llama.errors import UsageError
from parallel_llama.files.fields import Fields, shown

Value = TypeVar("Value")

_ALL_LINEAR = "all-linear"

# The most patterns with repetitions in rank_pattern and alpha_pattern; each runs on every module.
_MAX_REPEATING = 16

_USED = frozenset(
    {
        "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern",
        "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
        "modules_to_save", "ensure_weight_tying", "bias", "init_lora_weights",
    }
)  # fmt: skip
# Keys that describe the training, and do not change the merged weights.
_UNUSED = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode",
        "lora_dropout", "eva_config", "megatron_core", "qalora_group_size", "peft_version",
    }
)  # fmt: skip
# Ways to initialise A and B that leave the base weights unchanged.
_INITS = (None, True, False, "gaussian", "eva", "orthogonal")

MERGE_WITH_PEFT = (
    "merge the adapter with peft (merge_and_unload), save that model, and reshard it without "
    "--merge-adapter"
)


@dataclass(frozen=True)
class LoraConfig:
    """The settings of an adapter; module names are those of transformers' model.

    Args:
        rank: the rank of modules that `ranks` does not match.
        alpha: the numerator of the scaling of modules that `alphas` does not match.
        is_rank_stabilised: whether the scaling divides by the square root of the rank.
        ranks: ranks by pattern of module names; the first match is used.
        alphas: numerators by pattern; the first match is used.
        targets: the modules with A and B: suffixes of names, each with a leading dot; a pattern; or
            None for all linear modules of the layers.
        excluded: modules of `targets` without A and B.
        layers: the layers with A and B; None for all.
        layer_numbers: patterns of module names; the group `number` of a match is the layer.
        saved: suffixes of the names of modules that were trained whole.
        keeps_tied: whether tied embeddings stay tied if they were trained whole.
    """

    rank: int
    alpha: float
    is_rank_stabilised: bool
    ranks: tuple[tuple[re.Pattern[str], int], ...]
    alphas: tuple[tuple[re.Pattern[str], float], ...]
    targets: tuple[str, ...] | re.Pattern[str] | None
    excluded: tuple[str, ...] | re.Pattern[str]
    layers: frozenset[int] | None
    layer_numbers: tuple[re.Pattern[str], ...]
    saved: tuple[str, ...]
    keeps_tied: bool

    def is_target(self, module: str) -> bool:
        """Whether a module has A and B.

        If `targets` is None, `module` must be a linear module of the layers.
        """
        if _is_named(module, self.excluded) or self.is_saved(module):
            return False
        if self.targets is None or isinstance(self.targets, re.Pattern):
            return self.targets is None or _is_named(module, self.targets)
        return _is_named(module, self.targets) and self._is_in_layers(module)

    def is_saved(self, module: str) -> bool:
        """Whether a module, or a module that contains it, was trained whole."""
        parts = module.split(".")
        paths = [".".join(parts[: n + 1]) for n in range(len(parts))]
        return any(path.endswith(self.saved) for path in paths) if self.saved else False

    def rank_of(self, module: str) -> int:
        return _first_match(self.ranks, module, self.rank)

    def scaling_of(self, module: str) -> float:
        """The factor by which B @ A is multiplied before it is added to the weight."""
        rank = self.rank_of(module)
        alpha = _first_match(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)

    def _is_in_layers(self, module: str) -> bool:
        if self.layers is None:
            return True
        match = next(filter(None, (pattern.match(module) for pattern in self.layer_numbers)), None)
        return match is not None and int(match["number"]) in self.layers


def lora_config(values: Mapping[str, Any]) -> LoraConfig:
    """The settings in the content of adapter_config.json.

    Raises: UsageError for a setting that is not supported, is missing, or is out of range.
    """
    fields = Fields(values)
    _refuse_unsupported(fields)
    ranks = [
        (key, _rank(f"rank_pattern {key}", value))
        for key, value in fields.mapping("rank_pattern").items()
    ]
    alphas = [
        (key, Fields({f"alpha_pattern {key}": value}).number(f"alpha_pattern {key}"))
        for key, value in fields.mapping("alpha_pattern").items()
    ]
    if sum(repeats(key) for key, _ in (*ranks, *alphas)) > _MAX_REPEATING:
        raise UsageError(
            f"rank_pattern and alpha_pattern have more than {_MAX_REPEATING} patterns with "
            f"repetitions; name the modules instead, or {MERGE_WITH_PEFT}"
        )
    targets = _names(fields, "target_modules")
    if not targets:
        raise UsageError("target_modules names no module; use the file that peft saved")
    is_all = isinstance(targets, str) and targets.lower() == _ALL_LINEAR
    layers = fields.integers("layers_to_transform")
    lists = _names(fields, "layers_pattern") or [r"[^.]*"]
    if isinstance(targets, str) and layers:
        raise UsageError(
            "layers_to_transform needs a list of target_modules; state the layers in the pattern"
        )
    return LoraConfig(
        rank=_rank("r", fields.integer("r", 8)),
        alpha=fields.number("lora_alpha", 8),
        is_rank_stabilised=fields.flag("use_rslora", False),
        ranks=tuple((_ending(key), rank) for key, rank in ranks),
        alphas=tuple((_ending(key), alpha) for key, alpha in alphas),
        targets=None if is_all else _compiled(targets),
        excluded=_compiled(_names(fields, "exclude_modules")),
        layers=frozenset(layers) if layers else None,
        layer_numbers=tuple(map(_layer_number, (lists,) if isinstance(lists, str) else lists)),
        saved=tuple(fields.strings("modules_to_save")),
        keeps_tied=fields.flag("ensure_weight_tying", False),
    )


def _refuse_unsupported(fields: Fields) -> None:
    kind = fields.string("peft_type")
    if kind.upper() != "LORA":
        raise UsageError(
            f"peft_type={shown(kind)} is not supported, only 'LORA'; {MERGE_WITH_PEFT}"
        )
    if (bias := fields.string("bias", "none")) != "none":
        raise UsageError(f"bias={shown(bias)} is not supported, only 'none'; {MERGE_WITH_PEFT}")
    if (init := fields.values.get("init_lora_weights")) not in _INITS:
        raise UsageError(
            f"init_lora_weights={shown(init)} is not supported: it changes the base weights before "
            "the training; save the adapter with path_initial_model_for_weight_conversion, or "
            f"{MERGE_WITH_PEFT}"
        )
    for key, value in fields.values.items():
        if key not in _USED and key not in _UNUSED and value not in (None, False, "", [], {}):
            raise UsageError(
                f"{key[:80]}={shown(value)} is not supported, only null, false or an empty value; "
                f"{MERGE_WITH_PEFT}"
            )


def _rank(key: str, value: object) -> int:
    rank = Fields({key: value}).integer(key)
    if rank < 1:
        raise UsageError(f"{key}={rank}: a rank is at least 1; use the file that peft saved")
    return rank


def _names(fields: Fields, key: str) -> str | list[str]:
    """A pattern, or a list of names; empty if the key is missing."""
    if isinstance(fields.values.get(key), str):
        return fields.string(key)
    return fields.strings(key)


def _compiled(names: str | list[str]) -> tuple[str, ...] | re.Pattern[str]:
    """A pattern, or suffixes of names, each with a leading dot."""
    return compiled_pattern(names) if isinstance(names, str) else tuple(f".{n}" for n in names)


def _layer_number(of_list: str) -> re.Pattern[str]:
    return re.compile(
        rf"(?:^|.*?\.)(?:{compiled_pattern(of_list).pattern})\.(?P<number>\d{{1,9}})\."
    )


def _ending(key: str) -> re.Pattern[str]:
    """Matches a whole module name, or the part after one of its dots."""
    return re.compile(rf"(?:.*\.)?(?:{compiled_pattern(key).pattern})$")


def _is_named(module: str, names: tuple[str, ...] | re.Pattern[str]) -> bool:
    if isinstance(names, re.Pattern):
        return names.fullmatch(module) is not None
    return f".{module}".endswith(names)


def _first_match(
    patterns: tuple[tuple[re.Pattern[str], Value], ...], module: str, usual: Value
) -> Value:
    return next((value for pattern, value in patterns if pattern.match(module)), usual)
