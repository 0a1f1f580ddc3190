"""llama.cpp, by llama-cpp-python's bindings of its C interface.

All prompts are prefilled together in llama.cpp's default batches; then each step decodes one token
of every sequence. Keys and values are float16, its default, or float32 with float32 weights.
"""

import ctypes
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import llama_cpp
import numpy as np

from launch.bench.engines import Measurement, Setup

# Q4_K here is llama.cpp's file type Q4_K_M, a mix of several quantisations.
_FTYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q4_K": 15, "BF16": 32}
_F32 = 0
_CONTEXT_STEP = 256

# A token, its position, its sequence, and whether its logits are needed.
Entry = tuple[int, int, int, bool]


def _build() -> str:
    """The features of the processor for which the library was built."""
    said = llama_cpp.llama_print_system_info().decode().replace("CPU : ", "").split(" | ")
    return " ".join(each.partition(" = ")[0] for each in said if each.endswith(" = 1"))


VERSIONS = {"llama-cpp-python": llama_cpp.__version__, "built for": _build()}


def convert(source: Path, target: Path, form: str) -> None:
    """Converts a float32 GGUF file to `form` with llama.cpp; F32 is only a link."""
    if form == "F32":
        target.symlink_to(source)
        return
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = _FTYPES[form]
    paths = str(source).encode(), str(target).encode()
    if code := llama_cpp.llama_model_quantize(*paths, ctypes.byref(params)):
        raise SystemExit(f"llama_model_quantize to {form} ended with {code}")


class LlamaCpp:
    def __init__(self, setup: Setup) -> None:
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(setup.model.encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        # A sequence gets n_ctx / n_prompts, which must be a multiple of _CONTEXT_STEP.
        params.n_ctx = setup.n_prompts * (-(-setup.max_seq_len // _CONTEXT_STEP) * _CONTEXT_STEP)
        params.n_seq_max = setup.n_prompts
        params.n_threads = params.n_threads_batch = setup.n_threads
        if setup.form == "F32":
            params.type_k = params.type_v = _F32
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise SystemExit("llama.cpp could not make a context")
        self.n_batch = llama_cpp.llama_n_batch(self.context)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(self.n_batch, 0, 1)

    def answer(self, prompts: Sequence[Sequence[int]], n_new: int) -> Measurement:
        tokens: list[list[int]] = [[] for _ in prompts]
        first_token_s = 0.0
        started = time.perf_counter()
        for sequence, logits in self._logits(
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ):
            tokens[sequence].append(int(logits.argmax()))
            first_token_s = first_token_s or time.perf_counter() - started
        prefill_s = time.perf_counter() - started
        for step in range(n_new - 1):
            entries = [
                (own[-1], len(prompt) + step, sequence, True)
                for sequence, (own, prompt) in enumerate(zip(tokens, prompts, strict=True))
            ]
            for sequence, logits in self._logits(entries):
                tokens[sequence].append(int(logits.argmax()))
        total_s = time.perf_counter() - started
        self._forget()
        return Measurement(tokens, first_token_s, total_s, prefill_s)

    def nll(self, tokens: Sequence[int]) -> float:
        entries = [(token, position, 0, True) for position, token in enumerate(tokens[:-1])]
        total = 0.0
        for token, (_, logits) in zip(tokens[1:], self._logits(entries), strict=True):
            values = logits.astype(np.float64)
            total += np.logaddexp.reduce(values) - values[token]
        self._forget()
        return float(total) / (len(tokens) - 1)

    def _logits(self, entries: Iterable[Entry]) -> Iterator[tuple[int, np.ndarray]]:
        """Yields the sequence and the logits of the entries that need logits, in order."""
        left = list(entries)
        while left:
            now, left = left[: self.n_batch], left[self.n_batch :]
            batch = self.batch
            batch.n_tokens = len(now)
            for at, (token, position, sequence, wanted) in enumerate(now):
                batch.token[at], batch.pos[at], batch.logits[at] = token, position, wanted
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
            if code := llama_cpp.llama_decode(self.context, batch):
                raise SystemExit(f"llama_decode ended with {code}")
            for at, (_, _, sequence, wanted) in enumerate(now):
                if wanted:
                    pointer = llama_cpp.llama_get_logits_ith(self.context, at)
                    yield sequence, np.ctypeslib.as_array(pointer, (self.n_vocab,))

    def _forget(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), False)


load = LlamaCpp
