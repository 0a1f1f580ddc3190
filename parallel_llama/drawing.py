"""From the works of a step to the draws of its tokens, and what can come of a draw.

A work that draws has one row for its last known token and one for each draft: what would be drawn
there if the drafts before it had been.
"""

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor

from parallel_llama.parallel import Communicator
from parallel_llama.sampling import Draw, History, NoTokenLeft, Sampled, sample
from parallel_llama.scheduler import Work


def rows_to_draw(works: Sequence[Work]) -> list[int]:
    """The rows of the batch from which tokens are drawn, in the order of the works."""
    rows: list[int] = []
    stop = 0
    for work in works:
        stop += len(work.tokens)
        if work.draws:
            rows += range(stop - 1 - work.n_drafts, stop)
    return rows


def draws_of(work: Work, history: History | None, mask: bytes | None) -> Iterator[Draw]:
    """The draws of one work, `mask` being which tokens may come next at all."""
    choice, request, drafts = work.choice, work.choice.request, work.drafts
    for n in range(1 + len(drafts)):
        banned = request.banned_ids(choice.n_drawn + n)
        if request.bad_ids:
            drawn = [*choice.tokens[choice.n_prompt :], *drafts[:n]]
            banned |= request.ends_of_bad_words(drawn)
        yield Draw(
            request.params,
            request.seed,
            choice.number,
            len(choice.tokens) + n,
            request.index,
            history=history,
            drafts=drafts[:n],
            banned=banned,
            mask=mask,
        )


def draw_or_none(
    logits: Tensor, vocab: range, draws: Sequence[Draw], comm: Communicator
) -> list[Sampled | None]:
    """A token for each row; none where what the draw forbids leaves it none.

    Shapes: logits [n, V_local] local, n draws.
    Collective: like `sample`, and once more for the others of a row that has no token.
    """
    try:
        return list(sample(logits, vocab, draws, comm))
    except NoTokenLeft as error:
        able = [row for row in range(len(draws)) if row not in error.rows]
    drawn: list[Sampled | None] = [None] * len(draws)
    for row, one in zip(
        able, sample(logits[able], vocab, [draws[row] for row in able], comm), strict=True
    ):
        drawn[row] = one
    return drawn


def until_none(drawn: Iterable[Sampled | None]) -> list[Sampled]:
    """The draws before the first that has no token."""
    first = []
    for one in drawn:
        if one is None:
            break
        first.append(one)
    return first
