"""What a folder that is to be written must be, found before anything is read. No torch."""

import os
from pathlib import Path
from typing import Literal

from parallel_llama.config import ModelArgs, default_quant, stored_formats
from parallel_llama.config.quantised import NATIVE_GROUPS
from parallel_llama.dtypes import GroupFormat, make_precision
from parallel_llama.errors import UsageError
from parallel_llama.families import parameters
from parallel_llama.files.bounded_files import has_short_name, is_folder, is_there, resolved
from parallel_llama.files.model_files import ModelFiles

TargetKind = Literal["meta", "hf", "native"]


def check_target(source: ModelFiles, target: Path) -> None:
    """Refuse a target that is there, that nothing can be written to, or that lies in the source.

    Raises: UsageError; UnreadableFile if the way there is closed.
    """
    parent = target.parent
    if target.name in ("", ".."):
        raise UsageError(f"{target}: not the name of a new folder; give one")
    if is_there(target) and target.samefile(source.path):
        raise UsageError(f"{target}: is the source itself; give the name of a new folder")
    if os.path.lexists(target):
        raise UsageError(f"{target}: is there already; give another name, or remove it first")
    if not is_folder(parent):
        raise UsageError(f"{target}: the folder {parent} is not there; create it first")
    if is_folder(source.path) and resolved(parent).is_relative_to(resolved(source.path)):
        raise UsageError(f"{target}: lies inside the source {source.path}; give a place outside it")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"{target}: the folder {parent} cannot be written to")
    if not has_short_name(partial_path(target)):
        raise UsageError(f"{target.name[:80]}...: too long for a name; give a shorter one")


def partial_path(target: Path) -> Path:
    """The folder beside a target in which it grows until it is whole; its name is the longer."""
    return target.parent / f".{target.name}.partial"


def check_parts(kind: TargetKind, args: ModelArgs, n_parts: int) -> None:
    """Refuse a number of files that a layout cannot have.

    Raises: UsageError.
    """
    if n_parts < 1:
        raise UsageError(f"{n_parts} files: at least 1 is needed; use --tp 1 or more")
    if kind == "meta" and n_parts > args.n_heads:
        raise UsageError(
            f"n_heads={args.n_heads} and {n_parts} files for Meta's ranks: each needs at least one "
            f"query head; use --tp 1 to {args.n_heads}"
        )


def target_formats(
    source: ModelFiles, args: ModelArgs, kind: TargetKind, quant: str | None, dtype: str | None
) -> dict[str, GroupFormat]:
    """The formats of the weights that are written quantised, by Meta's names.

    Where no `quant` is asked for, a folder that is quantised stays so in a native one.

    Raises: UsageError for what this model or layout cannot have, or if quantised weights would
    become plain values of no `dtype` that anyone chose.
    """
    found, stored = default_quant(source, args), stored_formats(source, args)
    if quant is None:
        quant = found if kind == "native" else "none"
    if quant == "none":
        if found != "none" and dtype is None:
            can_stay = all(form in NATIVE_GROUPS.values() for form in stored.values())
            raise UsageError(
                f"{source.path}: its weights are quantised; give the dtype that they are to have "
                "as plain values with --dtype"
                + (", or keep them with --format native" if can_stay else "")
            )
        return {}
    if kind != "native":
        raise UsageError(
            f"--quant {quant} and --format {kind}: a native folder alone holds quantised weights; "
            "use --format native"
        )
    precision = make_precision(args, "float32", "cpu", quant, stored)
    formats = {}
    for param in parameters(args):
        form = precision.form_of(param.kind, param.name)
        if isinstance(form, GroupFormat):
            if NATIVE_GROUPS.get(form.name) != form:
                raise UsageError(
                    f"{param.name}: is in {form.name}, and a native folder holds "
                    f"{', '.join(NATIVE_GROUPS)}; use --quant int8, int4 or fp8, or --quant none "
                    "with a --dtype"
                )
            formats[param.name] = form
    return formats
