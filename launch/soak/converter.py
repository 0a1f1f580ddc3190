"""Converts Hugging Face folders with llama.cpp's own converter.

    python launch/soak/converter.py LLAMA_CPP < FILE

Each line of FILE is a folder and the GGUF file to write, separated by a tab. The files have no
tokenizer: the converter knows the hashes of some tokenizers, and refuses all others. The program
prints the path of each file on a line. If the file was not written, a tab and the error follow.

This program does not import `parallel_llama`.
"""

import sys
from typing import Any

LLAMA_CPP = sys.argv[1]
sys.path[:0] = [LLAMA_CPP, f"{LLAMA_CPP}/gguf-py"]

import conversion  # type: ignore[import-not-found] # noqa: E402
import convert_hf_to_gguf  # type: ignore[import-not-found] # noqa: E402


def write_no_tokenizer(model: Any) -> None:
    model._set_vocab_none()
    model.gguf_writer.kv_data[0].pop(f"{model.gguf_writer.arch}.vocab_size", None)
    model.gguf_writer.add_vocab_size(model.hparams["vocab_size"])


def without_tokenizer(kind: type) -> None:
    """Replaces the method that writes the tokenizer, in a class and all classes derived from it."""
    kind.set_vocab = write_no_tokenizer  # type: ignore[attr-defined]
    for derived in kind.__subclasses__():
        without_tokenizer(derived)


def main() -> None:
    conversion.load_all_models()
    without_tokenizer(conversion.base.TextModel)
    for line in sys.stdin:
        folder, file = line.rstrip("\n").split("\t")
        sys.argv = ["", folder, "--outfile", file, "--outtype", "f32"]
        try:
            convert_hf_to_gguf.main()
            print(file, flush=True)
        except (Exception, SystemExit) as error:
            line = " ".join(f"{type(error).__name__}: {error}".split())
            print(f"{file}\t{line}", flush=True)


main()
