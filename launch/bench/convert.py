"""Weights as one engine wants them, made in that engine's own Python.

python -m launch.bench.convert ENGINE_MODULE SOURCE TARGET FORM
"""

import sys
from importlib import import_module
from pathlib import Path

if __name__ == "__main__":
    name, source, target, form = sys.argv[1:]
    import_module(f"launch.bench.engines.{name}").convert(Path(source), Path(target), form)
