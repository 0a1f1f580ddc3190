"""The start, `plan` and the runner agree on why decode steps run operator by operator."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from mixes import ARGS, WINDOWED, make_runner
from test_cuda_graphs import paged_ops
from thread_ranks import run_on_threads
from tiny_folder import write_chat_folder

from parallel_llama.cli import main as command_line
from parallel_llama.engine.llm_config import LLMConfig
from parallel_llama.engine.setup import ModelSetup
from parallel_llama.families.model_args import ModelArgs, RopeScaling
from parallel_llama.parallel.collectives import Communicator
from parallel_llama.plan import KVSplit, make_plan, why_unrecorded

SINKING = replace(WINDOWED, attention_sinks=3)
DYNAMIC = replace(ARGS, rope_scaling=RopeScaling("dynamic", factor=2.0))


@pytest.mark.parametrize(
    ("args", "kv_split", "reason"),
    [
        (ARGS, "heads", None),
        (WINDOWED, "heads", None),
        (
            ARGS,
            "sequence",
            "sharded by sequence the ranks .* shard the KV cache by heads",
        ),
        (SINKING, "heads", "operator by operator because of attention sinks; drop them if"),
        (DYNAMIC, "heads", "operator by operator: dynamic scaling"),
    ],
    ids=["plain", "windows", "sequence", "sinks", "dynamic"],
)
def test_steps_are_recorded_unless_there_is_a_reason(
    args: ModelArgs, kv_split: KVSplit, reason: str | None
) -> None:
    """5 ranks hold copies of 3 KV heads, so the cache is sharded by token if kv_split allows it."""
    found = why_unrecorded(args, make_plan(args, 5, kv_split=kv_split).kv_parts, "cuda")
    assert (found is None) == (reason is None)
    assert re.search(reason or "", found or "")

    def records(comm: Communicator) -> bool:
        return make_runner(comm, args, kv_split=kv_split, ops=paged_ops(args)).draws_on_device

    assert run_on_threads(5, records) == [found is None] * 5


def test_cpu_records_dynamic_rope_but_not_sinks_beyond_the_window() -> None:
    assert why_unrecorded(DYNAMIC, 1, "cpu") is None
    assert "beyond the window of 7 tokens" in (why_unrecorded(SINKING, 1, "cpu") or "")


def test_the_cpu_has_no_kernel_for_layer_norm() -> None:
    """test_recorded_steps shows that such steps are not recorded."""
    args = replace(ARGS, norm="layer")
    assert "LayerNorm has no kernel" in (why_unrecorded(args, 1, "cpu") or "")
    assert why_unrecorded(args, 1, "cuda") is None


def test_startup_log_and_plan_give_the_same_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(write_chat_folder(tmp_path / "model"))
    for kv_split in ("heads", "sequence"):
        caplog.clear()
        setup = ModelSetup(LLMConfig(model, tp_size=7, kv_split=kv_split))
        argv = ["plan", "--model", model, "--nproc", "7", "--kv-split", kv_split]
        command_line.main([*argv, "--json"])
        reason = json.loads(capsys.readouterr().out)["unrecorded_decode"]
        assert (reason is None) == (setup.plan.kv_parts == 1) == (kv_split == "heads")
        assert [record.getMessage() for record in caplog.records] == ([reason] if reason else [])
        command_line.main(argv)
        page = " ".join(capsys.readouterr().out.split())
        assert reason in page if reason else "operator by operator" not in page
