"""Kernels compile for Arm's vectors from any machine; nothing is run here."""

import llvmlite.binding as llvm
import pytest
import torch
from group_samples import BLOCKS, INT4_MIN, INT8

from parallel_llama.ops.attention import PLAIN
from parallel_llama.ops.cpu import group_linear, program
from parallel_llama.ops.cpu.attention import AttentionKernel
from parallel_llama.ops.cpu.block_linear import BlockLinearKernel
from parallel_llama.ops.cpu.group_linear import GroupLinearKernel
from parallel_llama.ops.cpu.group_lookup import GroupLookupKernel
from parallel_llama.ops.cpu.linear import LinearKernel
from parallel_llama.ops.cpu.norm import NormKernel
from parallel_llama.ops.cpu.program import Machine

FORMS = pytest.mark.parametrize(
    "form", [INT8, INT4_MIN, BLOCKS["Q6_K"]], ids=lambda each: each.name
)
PLAIN_ARM, WITH_USDOT = Machine(16, 32), Machine(16, 32, "usdot")


@pytest.fixture
def assembly(monkeypatch):
    """Compiles the kernels that a function makes. Returns: what machines run, for each of them."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple("aarch64-unknown-linux-gnu")
    machine = target.create_target_machine(cpu="generic", features="+neon,+i8mm", opt=3)
    texts = []

    def compiled(*kernel):
        parsed = llvm.parse_assembly(str(program._module(*kernel)))
        passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(2))
        passes.getModulePassManager().run(parsed, passes)
        texts.append(machine.emit_assembly(parsed))

    def make(kernel):
        with monkeypatch.context() as patch:
            patch.setattr(program, "_compiled", compiled)
            patch.setattr(program, "_linked", lambda *_: {"entry": 0, "part": 0})
            # What is kept for all kernels is kept to be run.
            patch.setattr(group_linear, "_make_round", group_linear._make_round.__wrapped__)
            patch.setattr(program, "openmp", lambda: type("", (), {"GOMP_parallel": None}))
            kernel()
        return texts

    return make


@FORMS
def test_groups_are_multiplied_in_one_instruction_where_there_is_one(assembly, form):
    assert "usdot" in assembly(lambda: GroupLinearKernel(form, WITH_USDOT))[-1]


@FORMS
def test_groups_are_multiplied_without_it_too(assembly, form):
    text = assembly(lambda: GroupLinearKernel(form, PLAIN_ARM))[-1]
    assert "usdot" not in text and "mla" in text


@pytest.mark.parametrize(
    "kernel",
    [
        lambda: LinearKernel(torch.float32, torch.float32, PLAIN_ARM),
        lambda: LinearKernel(torch.float32, torch.bfloat16, PLAIN_ARM),
        lambda: BlockLinearKernel(torch.float32, torch.float32, PLAIN_ARM),
        lambda: AttentionKernel(torch.float32, torch.float32, 64, 3, PLAIN, PLAIN_ARM),
        lambda: NormKernel(torch.float32, PLAIN_ARM),
        lambda: GroupLookupKernel(INT8, PLAIN_ARM),
    ],
    ids=["linear", "linear of bfloat16", "linear of many rows", "attention", "norm", "lookup"],
)
def test_numbers_are_in_vectors(assembly, kernel):
    assert ".4s" in assembly(kernel)[-1]
