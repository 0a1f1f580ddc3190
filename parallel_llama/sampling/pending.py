"""Samples tokens on the device, so that the next step can start before the host reads them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel_llama.ops import SamplingKeys, TorchOps
from parallel_llama.ops.filters import Filters
from parallel_llama.parallel.collectives import Communicator
from parallel_llama.sampling.draw import SampledToken, SamplingRow, filters_of
from parallel_llama.sampling.sampler import N_CANDIDATES, best_tokens, sample

_NO_TOKEN = float(1 << 52)


class PendingDraws:
    """One sampled token per row: on the device at once, on the host after `read`.

    Args:
        logits: [n, V_local] local, for the token ids in `vocab`.
        drawn: [n, 2] float64 local, the result of `TorchOps.draw` with the keys of
            `row_sampling_key`. Rows with filters are sampled here.
        vocab_size: The size of the whole vocabulary.
        draws: The tokens to sample; `can_pend` holds for each.

    Shapes: `tokens` [n] int64 on the device; an id outside of the vocabulary for a row with a NaN
    and for a row whose candidates do not suffice.
    Collective: the constructor, with one all_gather, or two if a row has filters; and `read`.
    """

    def __init__(
        self,
        logits: Tensor,
        drawn: Tensor,
        vocab: range,
        vocab_size: int,
        draws: Sequence[SamplingRow],
        comm: Communicator,
        ops: TorchOps,
    ) -> None:
        assert draws and all(map(can_pend, draws))
        self._vocab, self._draws, self._comm = vocab, draws, comm
        gathered = comm.all_gather(drawn)  # [tp_size, n, 2] float64
        scores, rank_tokens = gathered.unbind(2)
        loses = scores != scores.amax(0)
        tokens = rank_tokens.masked_fill(loses, _NO_TOKEN).amin(0)
        self._filtered = [row for row, draw in enumerate(draws) if draw.params.is_filtered]
        if self._filtered:
            rows, filters = _copy_filters(self._filtered, draws, logits.device)
            # A copy, since the next step may overwrite the logits.
            self._logits = logits.index_select(0, rows)
            candidates = ops.candidates(
                self._logits, filters.sampling_keys.temperatures, N_CANDIDATES, vocab.start
            )
            filtered_tokens = ops.draw_filtered(comm.all_gather(candidates), filters, vocab_size)
            tokens = tokens.index_copy(0, rows, filtered_tokens.double())
        self.tokens = tokens.to(torch.int64)
        results = torch.cat((gathered.flatten(), tokens))
        is_cuda = results.device.type == "cuda"
        self._on_host = torch.empty(results.shape, dtype=results.dtype, pin_memory=is_cuda)
        self._on_host.copy_(results, non_blocking=True)
        self._copied = torch.cuda.current_stream().record_event() if is_cuda else None

    def read(self) -> tuple[list[SampledToken], bool]:
        """Wait for the tokens, but not for later work on the device.

        Returns: the tokens, and whether they equal the tokens on the device (`self.tokens`). They
        differ if a row had too few candidates and was sampled again.

        Raises: NumericalError, on all ranks, if a row has NaN or +inf, or only -inf.
        Collective: `sample` for the rows that are sampled again.
        """
        if self._copied is not None:
            self._copied.synchronize()
        n = len(self._draws)
        best_of_ranks = self._on_host[:-n].view(-1, n, 2).tolist()
        tokens = best_tokens(best_of_ranks, self._draws)
        for row in self._filtered:
            tokens[row] = int(self._on_host[row - n])
        undecided = [row for row in self._filtered if tokens[row] < 0]
        if undecided:
            logits = self._logits[[self._filtered.index(row) for row in undecided]]
            draws = [self._draws[row] for row in undecided]
            resampled = sample(logits, self._vocab, draws, self._comm)
            for row, one in zip(undecided, resampled, strict=True):
                tokens[row] = one.token
        return [SampledToken(token, None) for token in tokens], not undecided


def can_pend(draw: SamplingRow) -> bool:
    """Whether a token needs no log-probabilities, adjusted logits or large top_k."""
    params = draw.params
    return not draw.is_adjusted and params.logprobs is None and params.top_k <= N_CANDIDATES


def _copy_filters(
    rows: Sequence[int], draws: Sequence[SamplingRow], device: torch.device
) -> tuple[Tensor, Filters]:
    """Copies the row numbers and filters of some rows to the device in one transfer."""
    filters = filters_of([draws[row] for row in rows])
    columns = (torch.tensor(rows), filters.sampling_keys.keys, filters.top_k)
    floats = (filters.sampling_keys.temperatures, filters.top_p, filters.min_p)
    words = torch.stack((*columns, *(x.view(torch.int64) for x in floats)))
    if device.type == "cuda":
        words = words.pin_memory()
    numbers, keys, top_k, *rest = words.to(device, non_blocking=True)
    temperatures, top_p, min_p = (x.view(torch.float64) for x in rest)
    return numbers, Filters(SamplingKeys(keys, temperatures), top_k, top_p, min_p)
