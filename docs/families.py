"""Writes the table of families in models.md from their records.

python docs/families.py
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from parallel_llama.config.hf import args_from_hf
from parallel_llama.families import FAMILIES, Family, parameters, stored_slices
from parallel_llama.families.family import USUAL_KEYS
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.plan import why_unrecorded

PAGE = Path(__file__).with_name("models.md")
BEGIN, END = "<!-- docs/families.py writes this table -->\n\n", "\n<!-- end of the table -->\n"
COLUMNS = (
    "models",
    "`model_type`",
    "Hugging Face",
    "native",
    "Meta",
    "Mistral",
    "GGUF",
    "quantised folders",
    "CPU",
    "GPU",
)
READ, WRITTEN = "r", "w"
SIZES = {
    "dim": 256,
    "n_layers": 4,
    "n_heads": 4,
    "n_kv_heads": 4,
    "ffn_dim": 256,
    "vocab_size": 256,
}
# Keys without which config.json means a model that is not supported.
NEEDED = {"granitemoehybrid": {"layer_types": ["attention"] * 4, "num_local_experts": 0}}
# Keys of config.json for sizes of experts, which have no defaults in some families.
OTHER_SIZES = "intermediate_size", "shared_expert_intermediate_size"


def usual_args(family: Family) -> ModelArgs:
    """A small model of the family with the defaults of config.json."""
    sizes = {family.key(name): size for name, size in SIZES.items() if family.key(name)}
    sizes |= {key: 256 for key in OTHER_SIZES if key in family.reads.union(USUAL_KEYS.values())}
    return args_from_hf({"model_type": family.name, **sizes, **NEEDED.get(family.name, {})})


def row(family: Family) -> tuple[str, ...]:
    args, gguf = usual_args(family), family.gguf
    return (
        family.models,
        f"`{family.name}`",
        READ + WRITTEN,
        READ + WRITTEN,
        READ * (family.params == "meta") + WRITTEN,
        READ * (family.params == "mistral"),
        READ * (gguf is not None) + WRITTEN * (gguf is not None and gguf.writes is not None),
        quantised(family, args),
        *(decoding(args, device) for device in ("cpu", "cuda")),
    )


def decoding(args: ModelArgs, device: str) -> str:
    """How the decode steps of a model run on 'cpu' or 'cuda'."""
    if device == "cpu":  # which records the steps before the first scaled query
        args = replace(args, query_scale=0.0, scales_all_queries=False)
    return "operators" if why_unrecorded(args, 1, device) else "recorded"


def quantised(family: Family, args: ModelArgs) -> str:
    """Which quantised Hugging Face folders of the family are read.

    Formats with a scale per matrix or group need a tensor for each matrix.
    """
    slices = stored_slices(args, "hf")
    matrices = (param.name for param in parameters(args) if param.kind == "matrix")
    if all(len(slices[name].shape) == 2 for name in matrices):
        return "all"
    return "experts: MXFP4" if "hf" in family.interleaved_experts else "not experts"


def lines() -> Iterator[str]:
    for cells in (COLUMNS, ("---",) * len(COLUMNS), *map(row, FAMILIES.values())):
        yield f"| {' | '.join(cells)} |\n"


def as_markdown() -> str:
    """The table as Markdown, with a row for each family."""
    return "".join(lines())


def parts(page: str) -> tuple[str, str, str]:
    """The page before, in and after the table."""
    before, table = page.split(BEGIN)
    table, after = table.split(END)
    return before + BEGIN, table, END + after


if __name__ == "__main__":
    before, _, after = parts(PAGE.read_text())
    PAGE.write_text(before + as_markdown() + after)
