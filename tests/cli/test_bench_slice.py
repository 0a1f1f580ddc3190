"""`bench --slice` times one rank's shard alone, without the collectives that it would wait for."""

import json

import pytest
import torch

from parallel_llama import LLM
from parallel_llama.cli.main import main
from parallel_llama.errors import UsageError
from parallel_llama.parallel.collectives import Slice
from parallel_llama.plan import make_plan

N_LAYERS = 3
SIZES = ("--prompt-tokens=7", "--max-tokens=5", "--repeat=1", "--batch=2", "--dtype=float32")


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A configuration of 9 heads over 3 KV heads, without weights."""
    path = tmp_path_factory.mktemp("shapes") / "tiny.json"
    sizes = {"dim": 72, "n_layers": N_LAYERS, "n_heads": 9, "n_kv_heads": 3, "vocab_size": 1100}
    path.write_text(json.dumps({**sizes, "multiple_of": 8, "norm_eps": 1e-5}))
    return str(path)


def figures_of(shape: str, capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, object]:
    assert main(["bench", f"--model={shape}", *SIZES, *flags, "--json"]) == 0
    figures: dict[str, object] = json.loads(capsys.readouterr().out)
    return figures


@pytest.mark.parametrize("slice_of", ["1/2", "7/8"])
def test_modelled_step_is_measured_step_plus_collective_waits(shape, slice_of, capsys):
    figures = figures_of(shape, capsys, f"--slice={slice_of}")
    assert (figures["slice"], figures["tp_size"]) == (slice_of, int(slice_of[2:]))
    # One for the embedding, two for each half of a layer, and the exchange after the head.
    assert figures["collectives_per_step"] == 4 * N_LAYERS + 1 + 1
    measured = figures["compute_ms_per_step"]
    assert measured == figures["decode_ms_per_step"] > 0
    modelled = {"5 us": measured + 0.07, "7 us": measured + 0.098, "20 us": measured + 0.28}
    assert figures["modelled_ms_per_step"] == pytest.approx(modelled, abs=1e-4)
    n_bytes = figures["weight_bytes_per_step"] + figures["kv_bytes_per_step"]
    floor_ms = n_bytes / figures["read_bytes_per_s"] * 1e3
    assert figures["byte_floor_ms"] == pytest.approx(floor_ms, rel=1e-3)


def test_bytes_of_all_slices_add_up_to_those_of_one_rank(shape):
    def step_bytes(**options: object) -> int:
        with LLM(shape, dtype="float32", **options) as llm:
            return llm.weight_bytes_per_step(2)

    norms = 4 * 72 * (2 * N_LAYERS + 1)  # which every rank has
    parts = [step_bytes(slice_of=(rank, 3)) for rank in range(3)]
    assert sum(parts) - 2 * norms == step_bytes(random_weights=0) == step_bytes(slice_of=(0, 1))


def test_slice_holds_the_shard_of_its_rank(shape):
    with LLM(shape, slice_of=(4, 7), dtype="float32") as llm:
        runner = llm.engine.runner
        assert runner.shard == make_plan(llm.args, 7, exact=True).shards[4]
        assert len(llm.statistics.weight_bytes) == 1
        assert llm.engine.capacity.n_tokens == runner.caches[0].n_slots
        with LLM(shape, random_weights=0, dtype="float32") as whole:
            rows = slice(runner.shard.ffn.start, runner.shard.ffn.stop)
            own = runner.model.layers[1].feed_forward.w1.weight.values
            of_all = whole.engine.runner.model.layers[1].feed_forward.w1.weight.values
            assert len(own) and torch.equal(own, of_all[rows])


def test_table_separates_measured_from_modelled_times(shape, capsys):
    assert main(["bench", f"--model={shape}", *SIZES, "--slice=1/2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "rank 1 of 2 ranks, alone, random weights" in lines[0]
    (measured,) = [line for line in lines if line.startswith("measured ")]
    (modelled,) = [line for line in lines if line.startswith("modelled ")]
    assert "of this rank without collectives" in measured
    assert all(f"at {us} us" in modelled for us in (5, 7, 20)) and "14 collectives" in modelled


@pytest.mark.parametrize("slice_of", ["8/8", "0/0", "x/y", "1", "-1/2", "0/1025", "1/2/3", ""])
def test_invalid_slice_flag_is_refused(slice_of, capsys):
    assert main(["bench", f"--slice={slice_of}"]) == 2
    assert "R/N, rank R of N such as 0/8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "rank", "says"),
    [
        (["--slice=0/10"], None, "use 1 to 9 ranks"),
        (["--slice=3/5", "--kv-split=sequence"], None, "shard the KV cache by heads"),
        (["--slice=0/8", "--nproc=2"], None, "omit --nproc"),
        (["--slice=0/2", "--memory=32,16"], None, "one of equal shares; omit --memory"),
        (["--slice=0/2", f"--calibration={__file__}"], None, "omit --calibration"),
        (["--slice=0/8"], "0", "start it without torchrun"),
    ],
)
def test_slice_that_cannot_run_is_refused(shape, flags, rank, says, capsys, monkeypatch):
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "1")
    assert main(["bench", f"--model={shape}", *flags]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(("slice_of", "tp_size"), [((2, 2), 1), ((-1, 2), 1), ((0, 2), 2)])
def test_llm_refuses_slice_out_of_range_or_on_several_ranks(shape, slice_of, tp_size):
    with pytest.raises(UsageError, match="slice_of"):
        LLM(shape, slice_of=slice_of, tp_size=tp_size)


def test_slice_collectives_return_the_shapes_of_a_real_rank():
    comm = Slice(3)
    x = torch.arange(4.0)
    assert comm.all_reduce(x) is x
    assert torch.equal(comm.all_gather(x), torch.arange(4.0).repeat(3, 1))
    assert comm.n_collectives == 2
