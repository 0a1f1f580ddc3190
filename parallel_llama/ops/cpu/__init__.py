"""Machine code for the steps of a model, made for the CPU at hand.

Decoding has a row per sequence: what counts is that every weight and every key passes the core
once, as fast as memory gives it. Prompts have many rows: there the cores' arithmetic sets the pace.
Each kernel is a function of LLVM's intermediate representation, compiled when a model is loaded.
Attention needs no mask, and no copy of keys that lie here and there in the cache.

A kernel sums in an order that does not depend on how many rows or threads there are, and kernels
for few rows and for many sum in the same order. So a row's result is the same to the last bit in
any batch and at any cut of its prompt. Kernels on matrix tiles (AMX) are for many rows alone, and
sum in another order.

Kernels take a `run`: a call is made at once, or recorded and replayed with those of a whole step.
"""

from parallel_llama.ops.cpu.all_reduce import make_all_reduce
from parallel_llama.ops.cpu.decode_attention import DecodeAttentionKernel, make_decode_attention
from parallel_llama.ops.cpu.elementwise import (
    make_add,
    make_largest,
    make_norm,
    make_silu_and_mul,
    make_weighted_sum,
)
from parallel_llama.ops.cpu.embedding import make_group_lookup, make_lookup
from parallel_llama.ops.cpu.gemm import make_gemm
from parallel_llama.ops.cpu.gemm_amx import GemmAMXKernel, make_gemm_amx
from parallel_llama.ops.cpu.gemv import MAX_ROWS, make_gemv, make_routed_gemv
from parallel_llama.ops.cpu.jit import Run, at_once, computes, this_machine
from parallel_llama.ops.cpu.kv_rows import make_unpack
from parallel_llama.ops.cpu.prefill_attention import PrefillAttentionKernel, make_prefill_attention
from parallel_llama.ops.cpu.prefill_attention_amx import (
    PrefillAttentionAMXKernel,
    make_prefill_attention_amx,
)
from parallel_llama.ops.cpu.quant_gemm import make_quant_gemm
from parallel_llama.ops.cpu.replay import Arena, KernelsOnly, NotRecorded, Recording, make_executor
from parallel_llama.ops.cpu.rotary import RotaryKernel, make_rotary
from parallel_llama.ops.cpu.route import make_route, make_routes

__all__ = [
    "MAX_ROWS",
    "Arena",
    "DecodeAttentionKernel",
    "GemmAMXKernel",
    "KernelsOnly",
    "NotRecorded",
    "PrefillAttentionAMXKernel",
    "PrefillAttentionKernel",
    "Recording",
    "RotaryKernel",
    "Run",
    "at_once",
    "computes",
    "make_add",
    "make_all_reduce",
    "make_decode_attention",
    "make_executor",
    "make_gemm",
    "make_gemm_amx",
    "make_gemv",
    "make_group_lookup",
    "make_largest",
    "make_lookup",
    "make_norm",
    "make_prefill_attention",
    "make_prefill_attention_amx",
    "make_quant_gemm",
    "make_rotary",
    "make_route",
    "make_routed_gemv",
    "make_routes",
    "make_silu_and_mul",
    "make_unpack",
    "make_weighted_sum",
    "this_machine",
]
