"""Llama 3.2 1B's shape: `shapes` says what is measured."""

from launch.bench.gpu_steps import Rows, Setting
from launch.bench.gpu_steps.shapes import of_shape


def rows(setting: Setting) -> Rows:
    yield from of_shape("llama-3.2-1b", ("none",), setting)
