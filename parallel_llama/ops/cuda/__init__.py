"""Kernels in Triton for a model on a CUDA device.

A step of a few rows reads every weight once; what counts is that few launches do it, and that none
waits for the host. So a kernel asks the device nothing: its grid comes from shapes alone.

A row's result does not depend on how many rows there are, nor on what they are, to the last bit.
Sums are in float32. A tile is a power of two, with a mask where fewer numbers are there.

A kernel is compiled once for a model, not again for another number of rows: Triton is told of the
arguments that hang on it, for it makes another kernel for a 1 and for what 16 divides.

Triton comes with torch for CUDA and with no other torch, so nothing outside of this folder imports
it, and this folder is imported where a model is on such a device.
"""
