"""Kernels for the CPU, compiled with LLVM for the machine at hand when a model is loaded.

In decoding, each sequence has one row, and memory bandwidth sets the pace: every weight and every
key is read once. Prompts have many rows, and arithmetic sets the pace. Attention needs no mask, and
reads keys and values where they are in the cache.

The order in which a kernel sums does not depend on the number of rows or threads, and it is the
same in the kernels for few rows and for many. So a row's result has the same bits in any batch and
wherever its prompt is cut. Only kernels on matrix tiles (AMX), which are for many rows, sum in
another order.

Kernels are called with a `run`, which makes the call at once or records it: see `replay`.
"""
