"""What attention makes of a query and a key before the softmax: a matter of the model."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Scores:
    """scale q k, and with a soft cap c of that c tanh(scale q k / c), which stays within c.

    Source: soft cap, Gemma 2, arXiv 2408.00118, section 2.
    """

    scale: float | None = None  # None: 1 / sqrt(head_dim)
    soft_cap: float | None = None

    def scale_of(self, head_dim: int) -> float:
        """The scale of heads of this size."""
        return head_dim**-0.5 if self.scale is None else self.scale

    def factor_of(self, head_dim: int) -> float:
        """What queries are multiplied by: the scale, divided by a soft cap."""
        return self.scale_of(head_dim) / (self.soft_cap or 1)


PLAIN = Scores()  # as in Llama
