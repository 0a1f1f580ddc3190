"""Draws that the device knows before the host does, for the step that comes after them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from parallel_llama.parallel.collectives import Communicator
from parallel_llama.sampling.draw import Draw, Sampled
from parallel_llama.sampling.sampler import leading_tokens

_NO_TOKEN = float(1 << 52)


class PendingDraws:
    """One token for each row, the best score's: on the device at once, on the host when read.

    `drawn` is what `TorchOps.draw` gives, of noise as `row_noise` says.

    Shapes: drawn [n, 2] float64 local; `tokens` [n] int64 on the device; a row with a nan has one
    that is in no vocabulary.
    Collective: the constructor, one all_gather.
    """

    def __init__(self, drawn: Tensor, draws: Sequence[Draw], comm: Communicator) -> None:
        assert all(map(can_pend, draws))
        self._draws = draws
        gathered = comm.all_gather(drawn)  # [tp_size, n, 2] float64
        scores, owners = gathered.unbind(2)
        loses = scores != scores.amax(0)
        self.tokens = owners.masked_fill(loses, _NO_TOKEN).amin(0).to(torch.int64)
        is_cuda = gathered.device.type == "cuda"
        self._of_ranks = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=is_cuda)
        self._of_ranks.copy_(gathered, non_blocking=True)
        self._copied = torch.cuda.current_stream().record_event() if is_cuda else None

    def read(self) -> list[Sampled]:
        """The draws, once they are here; what was launched after them is not waited for.

        Raises: NumericalError, on all ranks, where a row holds nan or +inf or nothing but -inf.
        """
        if self._copied is not None:
            self._copied.synchronize()
        tokens = leading_tokens(self._of_ranks, self._draws)
        return [Sampled(token, None) for token in tokens]


def can_pend(draw: Draw) -> bool:
    """Whether a draw is the best score of the model's own logits, and no more is asked for."""
    return draw.takes_best and draw.params.logprobs is None
