"""Speculative decoding with a draft model: a small model of the same vocabulary drafts tokens.

In each step the draft model runs the tokens that the model will run, and then extends the sequences
token by token. The model verifies these drafts in one forward pass, so they change the speed and
never a token. Both models run on the same ranks and share block tables: a token has the same slot
in both KV caches, and a block in the prefix cache has the keys and values of both.

A draft is sampled with the parameters and the random numbers of the token that it predicts. So two
models with similar logits mostly sample the same token, at any temperature.

Source: speculative decoding, arXiv 2211.17192.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from parallel_llama.engine.drafts import SequenceDrafts, row_costs
from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.engine.recorded_steps import Logits
from parallel_llama.engine.sampling_rows import draw_each, sampling_row
from parallel_llama.engine.scheduler import ScheduledTokens
from parallel_llama.engine.step_buffer import Chunk
from parallel_llama.errors import NumericalError
from parallel_llama.request import SamplingParams
from parallel_llama.sampling.draw import History, SamplingRow


@dataclass
class DraftRequest:
    """A sequence in a step, with `item.n_drafts` drafts to make, possibly 0.

    Args:
        history: for penalties, as in `SamplingRow`.
        mask: the tokens that the request allows, as in `SamplingRow`.
        drafted: the drafts so far.
    """

    item: ScheduledTokens
    drafts: SequenceDrafts
    history: History | None = None
    mask: bytes | None = None
    drafted: tuple[int, ...] = ()

    @property
    def n_known(self) -> int:
        """The number of the sequence's tokens up to the end of this step, without drafts."""
        return self.item.start + len(self.item.tokens) - self.item.n_drafts

    def next_row(self) -> SamplingRow:
        """The row that samples the next draft."""
        sequence, params = self.item.sequence, self.drafts.params
        return sampling_row(sequence, params, self.drafted, self.history, self.mask)


class DraftModel:
    """A draft model on this rank.

    Args:
        tables: as `shared_tables`.
        vocab_size: the vocabulary size of the model.
        relative_cost: as in `row_costs`; the same on all ranks.
    """

    def __init__(
        self, runner: ModelRunner, tables: Sequence[int], vocab_size: int, relative_cost: float
    ) -> None:
        self.runner, self._tables, self._vocab_size = runner, tables, vocab_size
        self._costs = row_costs(relative_cost)
        # A sliding window may drop keys that the next step would need to catch up, so with windows
        # every draft runs immediately.
        self._has_windows = any(group.window is not None for group in runner.kv_groups)

    def reserve(self, n_blocks: Sequence[int], block_size: int) -> None:
        """Allocate the KV cache; `n_blocks` has the blocks of each KV group of the model."""
        self.runner.reserve([n_blocks[number] for number in self._tables], block_size)

    def sequence_drafts(self, params: SamplingParams) -> SequenceDrafts:
        """The drafts of a new sequence."""
        return SequenceDrafts(params, self._costs)

    def run(self, requests: Sequence[DraftRequest]) -> list[tuple[int, ...]]:
        """Run the tokens of a step, and draft what follows.

        Returns: the drafts of each sequence. They are fewer than `item.n_drafts` if no token is
            allowed, or the draft model produces NaN or Inf.
        Collective: as a forward pass; then, for each draft, as `draw_each` and a forward pass.
        """
        logits = self._catch_up(requests)
        drafting = [request for request in requests if request.item.n_drafts]
        while drafting:
            drawn = self._draw(drafting, logits)
            drafting = [
                request for request in drawn if len(request.drafted) < request.item.n_drafts
            ]
            running = drawn if self._has_windows else drafting
            if running:
                logits = self._extend(running).rows(
                    [running.index(request) for request in drafting]
                )
        return [request.drafted for request in requests]

    def _catch_up(self, requests: Sequence[DraftRequest]) -> Logits:
        """Run the tokens of a step. Returns: one row of logits for each sequence with drafts."""
        chunks, rows, n_rows = [], [], 0
        for request in requests:
            start, drafts = request.item.start, request.drafts
            # If all drafts of the last step were accepted, the last draft has not run here.
            if not self._has_windows and drafts.n_run == start - 1:
                start = drafts.n_run
            chunks.append(
                self._chunk(request, request.item.sequence.tokens[start : request.n_known], start)
            )
            drafts.n_run = request.n_known + max(request.item.n_drafts - 1, 0)
            n_rows += request.n_known - start
            if request.item.n_drafts:
                rows.append(n_rows - 1)
        if not all(chunk.is_decoded for chunk in chunks):
            return self.runner.step(chunks, rows)[0]
        logits, _ = self.runner.step(chunks, range(n_rows))  # a recorded step has all rows
        return logits if len(rows) == n_rows else logits.rows(rows)

    def _chunk(self, request: DraftRequest, tokens: Sequence[int], start: int) -> Chunk:
        sequence = request.item.sequence
        tables = [sequence.tables[number] for number in self._tables]
        return Chunk(tokens, start, tables, sequence.n_prompt)

    def _draw(self, drafting: Sequence[DraftRequest], logits: Logits) -> list[DraftRequest]:
        """Sample one draft of each sequence. Returns: the sequences that have a new draft."""
        rows = [[request.next_row()] for request in drafting]
        is_greedy = all(request.drafts.params.is_greedy for request in drafting)
        best = logits.largest if is_greedy else None
        try:
            drawn = draw_each(logits.values, self.runner.shard.vocab, rows, self.runner.comm, best)
        except NumericalError:  # on all ranks
            return []
        extended = []
        for request, tokens in zip(drafting, drawn, strict=True):
            if tokens and tokens[0].token < self._vocab_size:
                request.drafted += (tokens[0].token,)
                extended.append(request)
        return extended

    def _extend(self, running: Sequence[DraftRequest]) -> Logits:
        """Run the latest draft of each sequence."""
        chunks = [
            self._chunk(request, request.drafted[-1:], request.n_known + len(request.drafted) - 1)
            for request in running
        ]
        logits, _ = self.runner.step(chunks, range(len(chunks)))
        return logits
