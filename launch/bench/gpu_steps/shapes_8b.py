"""Llama 3 8B's shape, in 16, 8 and 4 bits: `shapes` says what is measured."""

from launch.bench.gpu_steps import Rows, Setting
from launch.bench.gpu_steps.shapes import of_shape


def rows(setting: Setting) -> Rows:
    yield from of_shape("llama-3-8b", ("none", "int8", "int4"), setting)
