"""Triton kernels for a model on a CUDA device.

A step of a few rows reads every weight once, so launches and host synchronisations must be few.
Grids depend only on shapes, and no kernel synchronises.

A row's bits do not depend on the other rows of the batch, with two exceptions: in `quant_linear`
above MAX_ROWS rows, and in `chunk_attention` with a sliding window, where they depend on how the
prompt is divided. Dense products of more than MAX_ROWS rows do not run here, but in cuBLAS (see
`cuda_ops`). Sums are in float32. Tile sizes are powers of two, with masks.

A kernel is compiled once per model, not per number of rows, since arguments that depend on the
number of rows are marked as not specialised. Otherwise Triton would compile anew for 1 and for
multiples of 16. Two kinds of kernels have variants: the product with integer matrices has one for
one row and one for several, and kernels that read a `Product` have one for tensors and one for each
number of parts.

Triton comes with torch for CUDA only, so only this folder imports Triton, and only a model on a
CUDA device imports this folder.
"""
