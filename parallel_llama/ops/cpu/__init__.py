"""Kernels for the CPU, compiled with LLVM for this machine when a model is loaded.

Decoding has one row per sequence and is limited by memory bandwidth: every weight and every key is
read once. Prefill has many rows and is limited by arithmetic. Attention takes no mask tensor, and
reads keys and values in place from the KV cache, except on matrix tiles (AMX).

The order in which a kernel sums does not depend on the number of rows or threads, and it is the
same in the kernels for few rows and for many. So a row's result has the same bits in any batch and
for any chunks of its prompt. Only kernels on matrix tiles, which are for many rows, sum in another
order.

A kernel's `run` is a launcher, which makes the call at once or records it: see `replay`.
"""
