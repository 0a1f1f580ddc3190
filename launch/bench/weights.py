"""Provides the weights of a model to every engine in the format that it loads."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from launch.bench.engines import Engine, Layout
from launch.bench.gguf_weights import write_gguf
from launch.bench.worker import ROOT, EngineError
from parallel_llama.config import ModelArgs
from parallel_llama.dtypes import QUANTS, Precision
from parallel_llama.errors import UsageError
from parallel_llama.files.model_files import ModelFiles
from parallel_llama.plan import bytes_passed_over, make_plan, values_by_form, weight_bytes
from parallel_llama.reshard.reshard import reshard


@dataclass(frozen=True)
class Weights:
    """The files of a model, and a `folder` for converted ones."""

    files: ModelFiles
    args: ModelArgs
    folder: Path

    def path(self, engine: Engine) -> Path:
        """The path that an engine loads; it is converted at the first call.

        Raises: EngineError if the conversion fails.
        """
        if engine.shares is not None:
            return self.path(engine.shares)
        base = self._base(engine.layout)
        if not engine.makes:
            return base
        target = self.folder / f"{engine.module}-{engine.form}{engine.makes}"
        if not target.exists():
            assert engine.python is not None
            arguments = [engine.module, str(base), str(target), engine.form]
            command = [engine.python, "-m", "launch.bench.worker", *arguments]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            if done.returncode:
                lines = (done.stderr.strip() or "no message").splitlines()
                raise EngineError(f"its weights could not be made: {lines[-1]}")
        return target

    def step_bytes(self, engine: Engine, batch: int) -> int:
        """Bytes of weights that one decode step of `batch` sequences must read.

        For converted files it is the size of the file times the fraction of values that are read.
        """
        if engine.shares is not None:
            return self.step_bytes(engine.shares, batch)
        precision = _precision(engine)
        whole = weight_bytes(
            make_plan(self.args, 1).shares[0], values_by_form(self.args, precision)
        )
        read = whole - bytes_passed_over(self.args, batch, precision)
        return round(_size(self.path(engine)) * read / whole) if engine.makes else read

    def _base(self, layout: Layout) -> Path:
        """The model in a layout in float32; it is written at the first call."""
        target = self.folder / layout
        if target.exists():
            return target
        if layout != "gguf":
            reshard(self.files, target, layout=layout, n_parts=1, dtype="float32")
            return target
        try:
            write_gguf(self.files, self.args, target)
        except UsageError as error:
            raise EngineError(str(error)) from error
        return target


def _precision(engine: Engine) -> Precision:
    """The precision of the weights after an engine has loaded them."""
    if engine.makes:
        return Precision.plain("float32")
    if engine.form in QUANTS:
        return Precision.on("cpu", "float32", engine.form)
    return Precision.on("cpu", engine.form)


def _size(path: Path) -> int:
    """The size of the file with the weights, which is in a folder for CTranslate2."""
    return (path / "model.bin" if path.is_dir() else path).stat().st_size
