"""The largest context and the largest batch for which a plan fits. No torch."""

from dataclasses import dataclass

from parallel_llama.cli.plan_request import PlanRequest
from parallel_llama.cli.remedies import most_that_fit
from parallel_llama.families.model_args import context_length

MAX_BATCH = 1_000_000


@dataclass(frozen=True)
class Largest:
    """Limits of a request on its hardware.

    Args:
        context: most tokens of a sequence at the request's batch; 0 if not even one token fits.
        model_context: the model's own context; that of a draft model may be shorter.
        batch: most sequences of the request's length; 0 if one does not fit.
    """

    context: int
    model_context: int
    batch: int


def find_largest(request: PlanRequest) -> Largest | None:
    """The limits of a request; None if its memory is not known."""
    if request.memory is None:
        return None
    requests = [request] if request.draft is None else [request, request.draft]
    longest = min(context_length(each.args) for each in requests)
    return Largest(
        most_that_fit(request, "max_seq_len", range(1, longest + 1)),
        context_length(request.args),
        most_that_fit(request, "batch", range(1, MAX_BATCH + 1)),
    )
