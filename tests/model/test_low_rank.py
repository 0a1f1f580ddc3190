"""LoRA adapters that are not merged: x A B on top of the base, cut by any shard plan."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from adapters import PATTERNED, PREFIX, merged_weights, write_adapter, write_merged
from float64_mode import float64_throughout
from parity_steps import full_logits, load_runner
from safetensors.torch import load_file
from test_recorded_steps import both_of
from thread_ranks import run_on_threads
from tiny_models import TINY_MODELS, TinyModel, write_hf
from torch import Tensor
from transformers_oracle import load_transformers, reference_logits

from parallel_llama.checkpoint.adapter_tensors import load_pairs
from parallel_llama.checkpoint.reading import open_checkpoint
from parallel_llama.config.adapter import load_served_adapter
from parallel_llama.config.layouts import load_model_args
from parallel_llama.dtypes import make_precision
from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.engine.step_buffer import Chunk
from parallel_llama.files.model_files import find_model
from parallel_llama.memory import adapter_bytes
from parallel_llama.model.adapters import adapter_addresses
from parallel_llama.ops import AdapterRoom
from parallel_llama.parallel.collectives import Communicator, Solo
from parallel_llama.plan import make_plan

TOKENS = list(range(3, 90, 3))
LINEAR = r".*\.(\w+_proj|query_key_value|dense\w*)"
MODELS = {
    "9/3": TINY_MODELS["9/3"],
    # The output and the embeddings share a weight; a fused projection has one A for q, k and v.
    "phi3": TinyModel(9, 3, 6, 54, family="phi3", own={"pad_token_id": 0}),
    # Attention and feed-forward in parallel, with one all_reduce.
    "falcon": TINY_MODELS["7/1 falcon, tied"],
    "gemma3": TINY_MODELS["8/2 gemma3"],
    # A shared expert, and a layer without experts.
    "shared expert": TinyModel(
        8, 2, 8, 64, ffn_dim=56, family="qwen2_moe",
        own={
            "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40, "mlp_only_layers": [1],
        },
    ),
}  # fmt: skip


def linear_of(name: str) -> str:
    """The modules that an adapter of this model changes."""
    return r".*(self_attn|mlp|shared_expert)\.\w+_proj" if name == "shared expert" else LINEAR


def logits_of(
    comm: Communicator, folder: Path, adapter: Path | None, cut: Mapping[str, Any]
) -> Tensor:
    """The logits of a sequence whose tokens run in two chunks."""
    runner = load_runner(comm, folder, len(TOKENS), cut)
    name = None
    if adapter is not None:
        name = "own"
        loaded = load_served_adapter(adapter, runner.args)
        runner.load_adapter(name, loaded)
        pairs = [*load_pairs(loaded, runner.shard, runner.dtype, runner.device)]
        held = sum(pair.a.nbytes + pair.b.nbytes for pair in pairs)
        precision = make_precision(runner.args, "float64", "cpu", "none", None)
        assert held == adapter_bytes(loaded, runner.shard, precision)
    hidden = [
        runner.forward(
            [Chunk(TOKENS[start:stop], start, [[0]] * len(runner.kv_groups), len(TOKENS), name)]
        )
        for start, stop in ((0, 20), (20, len(TOKENS)))
    ]
    return full_logits(runner, torch.cat(hidden))


@pytest.mark.parametrize("name", MODELS)
def test_logits_match_merged_weights_on_any_number_of_ranks(name, tmp_path):
    """In float64 at 1e-10; with exact sums the bits are equal as well."""
    base = write_hf(MODELS[name], tmp_path / "hf")
    modules = [*{name.rsplit(".", 2)[1] for name in load_file(base / "model.safetensors")}]
    targets: object = [each for each in modules if re.search("proj|dense|query", each)]
    if name == "shared expert":
        targets = linear_of(name)
    adapter = write_adapter(tmp_path / "adapter", base, linear_of(name), target_modules=targets)
    merged = write_merged(tmp_path / "merged", base, merged_weights(base, adapter))
    expected = reference_logits(merged, TOKENS)
    assert not torch.allclose(expected, reference_logits(base, TOKENS), atol=0.1)
    exact = []
    for tp_size in (1, 2, 3, 5):
        for logits, *_ in (
            run_on_threads(tp_size, logits_of, base, adapter, {"exact": is_exact})
            for is_exact in (False, True)
        ):
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
        exact.append(logits)
    assert all(torch.equal(each, exact[0]) for each in exact)


def test_ranks_without_channels_add_nothing(tmp_path):
    """A rank may have no channels of w1, and no outputs of w2."""
    base = write_hf(TinyModel(9, 3, 8, 9, ffn_dim=4), tmp_path / "hf")
    adapter = write_adapter(tmp_path / "adapter", base, LINEAR, target_modules="all-linear")
    alone = logits_of(Solo(), base, adapter, {})
    for is_exact in (False, True):
        for logits in run_on_threads(9, logits_of, base, adapter, {"exact": is_exact}):
            torch.testing.assert_close(logits, alone, rtol=0, atol=1e-10)


PEFT_SETTINGS = [
    {"target_modules": "all-linear"},
    PATTERNED,
]


@pytest.mark.parametrize("settings", PEFT_SETTINGS)
@pytest.mark.parametrize("name", ["9/3", "phi3", "gemma3"])
def test_peft_computes_the_same_logits(name, settings, tmp_path):
    """Against the library that defines the format."""
    base = write_hf(MODELS[name], tmp_path / "hf")
    config = peft.LoraConfig(r=3, lora_alpha=7, init_lora_weights=False, **settings)
    with float64_throughout(), torch.no_grad():
        model = peft.get_peft_model(load_transformers(base), config).double()
        for weight in filter(lambda each: each.requires_grad, model.parameters()):
            weight.copy_(torch.randn(weight.shape) * 0.3)
        model.save_pretrained(tmp_path / "adapter")
        expected = model.eval()(torch.tensor([TOKENS])).logits[0]
    for tp_size in (1, 2, 3, 5):
        for is_exact in (False, True):
            cut = {"exact": is_exact}
            (logits, *_) = run_on_threads(tp_size, logits_of, base, tmp_path / "adapter", cut)
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)


def decoded(comm: Communicator, base: Path, folders: Sequence[Path], exact: bool) -> list[Tensor]:
    """The hidden states of decode steps of five sequences, each recorded and by its operators.

    The rows of an adapter change from step to step, and adapters are loaded and unloaded.
    """
    runner = load_runner(comm, base, 16, {"exact": exact})
    runner.reserve([5] * len(runner.kv_groups), 16)
    both, found = both_of(runner), []
    loaded = [load_served_adapter(folder, runner.args) for folder in folders]
    runner.load_adapter("0", loaded[0])
    for at in range(6):
        name = f"{at + 1}"
        runner.load_adapter(name, loaded[(at + 1) % len(loaded)])
        names = [name, f"{at}", None, name, f"{at}"]
        chunks = [
            Chunk([7 * at + n], at, [[n]] * len(runner.kv_groups), 1, names[(at + n) % 5])
            for n in range(5)
        ]
        found.append(runner.forward(chunks))
        runner.unload_adapter(f"{at}")
    assert both.n_recorded == 6
    return found


@pytest.mark.parametrize("name", ["9/3", "gemma3", "shared expert"])
def test_recorded_step_is_bitwise_equal_to_its_operators(name, tmp_path):
    """With exact sums, the bits are also equal on any number of ranks."""
    base = write_hf(MODELS[name], tmp_path / "hf")
    modules = [*{name.rsplit(".", 2)[1] for name in load_file(base / "model.safetensors")}]
    targets: object = [each for each in modules if re.search("proj", each)]
    if name == "shared expert":
        targets = linear_of(name)
    folders = [
        write_adapter(tmp_path / f"{rank}", base, linear_of(name), lambda _, rank=rank: rank,
                      seed=rank, r=rank, target_modules=targets)
        for rank in (3, 19)
    ]  # fmt: skip
    alone = decoded(Solo(), base, folders, exact=True)
    for tp_size, exact in ((2, False), (3, True), (5, True)):
        for found in run_on_threads(tp_size, decoded, base, folders, exact):
            assert not exact or all(map(torch.equal, found, alone))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base whose weights every format can hold, and an adapter."""
    folder = tmp_path_factory.mktemp("wide")
    base = write_hf(TinyModel(4, 2, 32, 128, ffn_dim=160, n_layers=1), folder / "hf")
    return base, write_adapter(folder / "adapter", base, LINEAR, target_modules="all-linear")


@pytest.mark.parametrize(
    ("dtype", "quant"),
    [("float32", "none"), ("bfloat16", "none"), *(("float32", q) for q in ("int8", "int4", "fp8"))],
)
def test_adapter_sums_match_float64_for_every_base_format(wide, dtype, quant):
    """The low-rank part is computed in the computation dtype, whatever the format of the base."""
    base, adapter = wide
    files = find_model(str(base))
    args = load_model_args(files)
    precision = make_precision(args, dtype, "cpu", quant, None)
    plan = make_plan(args, 1, None, precision.quant_group_size)
    runner = ModelRunner.load(
        args, open_checkpoint(files, args), plan, Solo(), precision=precision,
        device=torch.device("cpu"),
    )  # fmt: skip
    runner.load_adapter("own", load_served_adapter(adapter, args))
    tensors = load_file(adapter / "adapter_model.safetensors")
    layer = runner.model.layers[0].feed_forward
    x = torch.randn(40, 128)
    adapter = adapter_addresses(runner.model, "own")
    for own in (range(40), [1, 7, 38]):
        room = AdapterRoom(40, torch.float32)
        room.fill([adapter if row in own else None for row in range(40)])
        both = layer.w13(x, room) - layer.w13(x)
        for which, found in zip(("gate", "up"), both.split(160, dim=1), strict=True):
            module = f"{PREFIX}model.layers.0.mlp.{which}_proj"
            a, b = (tensors[f"{module}.lora_{part}.weight"] for part in "AB")
            expected = torch.zeros(40, 160, dtype=torch.float64)
            expected[own] = x[own].double() @ a.T @ b.T * 8 / 3
            torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_rows_are_bitwise_equal_alone_and_in_batch(wide):
    """Few and many rows of an adapter, beside rows of another adapter and rows without adapter."""
    base, adapter = wide
    other = write_adapter(
        base.parent / "other", base, r".*\.[qo]_proj", lambda _: 5, seed=6,
        target_modules=["q_proj", "o_proj"], r=5, lora_alpha=3,
    )  # fmt: skip
    runner = load_runner(Solo(), base, 64)
    for name, folder in (("a", adapter), ("b", other)):
        runner.load_adapter(name, load_served_adapter(folder, runner.args))
    lengths = {"a": 50, "b": 7, None: 40}

    def hidden(names: Sequence[str | None]) -> list[Tensor]:
        chunks = [
            Chunk([(3 * at + n) % 211 for at in range(n)], 0, [[block]], n, name)
            for block, (name, n) in enumerate((name, lengths[name]) for name in names)
        ]
        runner.reserve([len(names)], 64)
        found = runner.forward(chunks).split([len(chunk.tokens) for chunk in chunks])
        last = torch.tensor([len(chunk.tokens) for chunk in chunks]).cumsum(0) - 1
        picked = runner.forward(chunks, last.tolist())  # the last block runs these rows alone
        assert torch.equal(picked, torch.cat(found)[last])
        return list(found)

    alone = [hidden([name])[0] for name in lengths]
    assert all(map(torch.equal, hidden([*lengths]), alone))
    assert not torch.equal(hidden([None, "b"])[0][:7], hidden(["b"])[0])
