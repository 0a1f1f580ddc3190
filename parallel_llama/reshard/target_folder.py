"""Checks of the target folder and its formats, before anything is read. No torch."""

import os
from pathlib import Path
from typing import Literal

from parallel_llama.config import ModelArgs, default_quant, stored_formats
from parallel_llama.config.quantised import NATIVE_QUANTS
from parallel_llama.dtypes import QuantFormat, make_precision
from parallel_llama.errors import UsageError
from parallel_llama.families import parameters
from parallel_llama.files.bounded_files import has_short_name, is_folder, is_there, resolved
from parallel_llama.files.model_files import ModelFiles

TargetKind = Literal["meta", "hf", "native"]


def check_target(source: ModelFiles, target: Path) -> None:
    """Refuse a target that exists, is not writable, or is inside the source.

    Raises: UsageError; UnreadableFile if the parent folder cannot be read.
    """
    parent = target.parent
    if target.name in ("", ".."):
        raise UsageError(f"{target}: not the name of a new folder; use another path")
    if is_there(target) and target.samefile(source.path):
        raise UsageError(f"{target}: is the source itself; give the name of a new folder")
    if os.path.lexists(target):
        raise UsageError(f"{target}: already exists; give another name, or remove it first")
    if not is_folder(parent):
        raise UsageError(f"{target}: the folder {parent} does not exist; create it first")
    if is_folder(source.path) and resolved(parent).is_relative_to(resolved(source.path)):
        raise UsageError(f"{target}: is inside the source {source.path}; use a path outside it")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"{target}: the folder {parent} is not writable")
    if not has_short_name(partial_path(target)):
        raise UsageError(f"{target.name[:80]}...: the name is too long; give a shorter one")


def partial_path(target: Path) -> Path:
    """The temporary folder beside a target, in which its files are written."""
    return target.parent / f".{target.name}.partial"


def check_parts(kind: TargetKind, args: ModelArgs, n_parts: int) -> None:
    """Refuse a number of files that a layout does not support.

    Raises: UsageError.
    """
    if n_parts < 1:
        raise UsageError(f"{n_parts} files: at least 1 is needed; use --tp 1 or more")
    if kind == "meta" and n_parts > args.n_heads:
        raise UsageError(
            f"n_heads={args.n_heads} and {n_parts} files: each needs at least one query head; use "
            f"--tp 1 to {args.n_heads}"
        )


def target_formats(
    source: ModelFiles, args: ModelArgs, kind: TargetKind, quant: str | None, dtype: str | None
) -> dict[str, QuantFormat]:
    """The formats of the weights that are written quantised, by Meta's names.

    Without `quant`, a quantised folder stays quantised in a native folder.

    Raises: UsageError for formats that this model or layout does not support, or if quantised
    weights would be decoded without a requested `dtype`.
    """
    found, stored = default_quant(source, args), stored_formats(source, args)
    if quant is None:
        quant = found if kind == "native" else "none"
    if quant == "none":
        if found != "none" and dtype is None:
            can_stay = all(form in NATIVE_QUANTS.values() for form in stored.values())
            raise UsageError(
                f"{source.path}: its weights are quantised; choose the dtype of the decoded values "
                "with --dtype" + (", or keep them with --format native" if can_stay else "")
            )
        return {}
    if kind != "native":
        raise UsageError(
            f"--quant {quant} and --format {kind}: only native folders support quantised weights; "
            "use --format native"
        )
    precision = make_precision(args, "float32", "cpu", quant, stored)
    formats = {}
    for param in parameters(args):
        form = precision.form_of(param.kind, param.name)
        if isinstance(form, QuantFormat):
            if NATIVE_QUANTS.get(form.name) != form:
                raise UsageError(
                    f"{param.name}: is in {form.name}, and native folders support "
                    f"{', '.join(NATIVE_QUANTS)}; use --quant int8, int4 or fp8, or --quant none "
                    "with a --dtype"
                )
            formats[param.name] = form
    return formats
