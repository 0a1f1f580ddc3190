"""Kernels are compiled for Arm on any machine, and not run."""

import llvmlite.binding as llvm
import pytest
import torch
from quant_samples import BLOCKS, INT4_MIN, INT8

from parallel_llama.ops.attention import PLAIN
from parallel_llama.ops.cpu import jit, quant_gemm
from parallel_llama.ops.cpu.decode_attention import DecodeAttentionKernel
from parallel_llama.ops.cpu.elementwise import NormKernel
from parallel_llama.ops.cpu.embedding import QuantEmbeddingKernel
from parallel_llama.ops.cpu.gemm import GemmKernel
from parallel_llama.ops.cpu.gemv import GemvKernel
from parallel_llama.ops.cpu.jit import CPUFeatures
from parallel_llama.ops.cpu.low_rank import LowRankKernel
from parallel_llama.ops.cpu.quant_gemm import QuantGemmKernel

FORMS = pytest.mark.parametrize(
    "form", [INT8, INT4_MIN, BLOCKS["Q6_K"]], ids=lambda each: each.name
)
PLAIN_ARM, WITH_USDOT = CPUFeatures(16, 32), CPUFeatures(16, 32, "usdot")


@pytest.fixture
def assembly(monkeypatch):
    """Compiles the kernels that a function makes. Returns: their assembly texts."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple("aarch64-unknown-linux-gnu")
    machine = target.create_target_machine(cpu="generic", features="+neon,+i8mm", opt=3)
    texts = []

    def compiled(*kernel):
        parsed = llvm.parse_assembly(str(jit._module(*kernel)))
        passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(2))
        passes.getModulePassManager().run(parsed, passes)
        texts.append(machine.emit_assembly(parsed))

    def make(kernel):
        with monkeypatch.context() as patch:
            patch.setattr(jit, "_compiled", compiled)
            patch.setattr(jit, "_linked", lambda *_: {"entry": 0, "part": 0})
            # A cached program would be run later.
            patch.setattr(quant_gemm, "_make_round", quant_gemm._make_round.__wrapped__)
            patch.setattr(jit, "openmp", lambda: type("", (), {"GOMP_parallel": None}))
            kernel()
        return texts

    return make


@FORMS
def test_quant_gemm_uses_usdot_if_available(assembly, form):
    assert "usdot" in assembly(lambda: QuantGemmKernel(form, WITH_USDOT))[-1]


@FORMS
def test_quant_gemm_uses_mla_without_usdot(assembly, form):
    text = assembly(lambda: QuantGemmKernel(form, PLAIN_ARM))[-1]
    assert "usdot" not in text and "mla" in text


@pytest.mark.parametrize(
    "kernel",
    [
        lambda: GemvKernel(torch.float32, torch.float32, PLAIN_ARM),
        lambda: GemvKernel(torch.float32, torch.bfloat16, PLAIN_ARM),
        lambda: GemmKernel(torch.float32, torch.float32, PLAIN_ARM),
        lambda: DecodeAttentionKernel(torch.float32, torch.float32, 64, 3, PLAIN, PLAIN_ARM),
        lambda: LowRankKernel(torch.float32, PLAIN_ARM),
        lambda: NormKernel(torch.float32, PLAIN_ARM),
        lambda: QuantEmbeddingKernel(INT8, PLAIN_ARM),
    ],
    ids=["gemv", "gemv of bfloat16", "gemm", "attention", "low rank", "norm", "lookup"],
)
def test_kernels_use_vector_instructions(assembly, kernel):
    assert ".4s" in assembly(kernel)[-1]
