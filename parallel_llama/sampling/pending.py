"""Draws that the device knows before the host does, for the step that comes after them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel_llama.ops import Noise, TorchOps
from parallel_llama.ops.filters import Filters
from parallel_llama.parallel.collectives import Communicator
from parallel_llama.sampling.draw import Draw, Sampled, filters_of
from parallel_llama.sampling.sampler import N_CANDIDATES, leading_tokens, sample

_NO_TOKEN = float(1 << 52)


class PendingDraws:
    """One token for each row: on the device at once, on the host when read.

    `drawn` is what `TorchOps.draw` gives, of noise as `row_noise` says; the rows with filters, for
    which it gives the largest logit, are drawn here.

    Shapes: logits [n, V_local] local, the scores of the token ids in `vocab`; drawn [n, 2] float64
    local; `tokens` [n] int64 on the device: one that is in no vocabulary for a row with a nan, and
    for one that its candidates do not settle.
    Collective: the constructor, one all_gather and another where a row has filters; and `read`.
    """

    def __init__(
        self,
        logits: Tensor,
        drawn: Tensor,
        vocab: range,
        vocab_size: int,
        draws: Sequence[Draw],
        comm: Communicator,
        ops: TorchOps,
    ) -> None:
        assert draws and all(map(can_pend, draws))
        self._vocab, self._draws, self._comm = vocab, draws, comm
        gathered = comm.all_gather(drawn)  # [tp_size, n, 2] float64
        scores, owners = gathered.unbind(2)
        loses = scores != scores.amax(0)
        tokens = owners.masked_fill(loses, _NO_TOKEN).amin(0)
        self._filtered = [row for row, draw in enumerate(draws) if draw.params.is_filtered]
        if self._filtered:
            rows, filters = _sent(self._filtered, draws, logits.device)
            # A copy, for the next step may put its own logits in the place of these.
            self._logits = logits.index_select(0, rows)
            found = ops.candidates(
                self._logits, filters.noise.temperatures, N_CANDIDATES, vocab.start
            )
            picked = ops.draw_filtered(comm.all_gather(found), filters, vocab_size)
            tokens = tokens.index_copy(0, rows, picked.double())
        self.tokens = tokens.to(torch.int64)
        known = torch.cat((gathered.flatten(), tokens))
        is_cuda = known.device.type == "cuda"
        self._here = torch.empty(known.shape, dtype=known.dtype, pin_memory=is_cuda)
        self._here.copy_(known, non_blocking=True)
        self._copied = torch.cuda.current_stream().record_event() if is_cuda else None

    def read(self) -> tuple[list[Sampled], bool]:
        """The draws, once they are here; what was launched after them is not waited for.

        Returns: also whether `tokens` were these. Where candidates did not settle a row they were
        not, and it is drawn anew.

        Raises: NumericalError, on all ranks, where a row holds nan or +inf or nothing but -inf.
        Collective: `sample` of the rows that are drawn anew.
        """
        if self._copied is not None:
            self._copied.synchronize()
        n = len(self._draws)
        of_ranks = self._here[:-n].view(-1, n, 2).tolist()
        tokens = leading_tokens(of_ranks, self._draws)
        for row in self._filtered:
            tokens[row] = int(self._here[row - n])
        unsettled = [row for row in self._filtered if tokens[row] < 0]
        if unsettled:
            own = self._logits[[self._filtered.index(row) for row in unsettled]]
            draws = [self._draws[row] for row in unsettled]
            anew = sample(own, self._vocab, draws, self._comm)
            for row, one in zip(unsettled, anew, strict=True):
                tokens[row] = one.token
        return [Sampled(token, None) for token in tokens], not unsettled


def can_pend(draw: Draw) -> bool:
    """Whether a draw is of the model's own logits, no more is asked for, and candidates may do."""
    params = draw.params
    return not draw.is_adjusted and params.logprobs is None and params.top_k <= N_CANDIDATES


def _sent(
    rows: Sequence[int], draws: Sequence[Draw], device: torch.device
) -> tuple[Tensor, Filters]:
    """Some rows' numbers and filters on the device, in one copy."""
    here = filters_of([draws[row] for row in rows])
    columns = (torch.tensor(rows), here.noise.keys, here.top_k)
    floats = (here.noise.temperatures, here.top_p, here.min_p)
    words = torch.stack((*columns, *(each.view(torch.int64) for each in floats)))
    if device.type == "cuda":
        words = words.pin_memory()
    numbers, keys, top_k, *rest = words.to(device, non_blocking=True)
    temperatures, top_p, min_p = (each.view(torch.float64) for each in rest)
    return numbers, Filters(Noise(keys, temperatures), top_k, top_p, min_p)
