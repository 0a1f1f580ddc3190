"""Detects ranks that compute wrong matrix products, on the CPU with exact sums.

In a step each output is computed by one rank and gathered by all, so a wrong product reaches all
ranks, and comparing their results does not reveal it. But with exact sums an output has the same
bits on every rank that computes it. So each rank sends a panel of a weight (4 to 16 outputs, as
stored) to all ranks, and every rank multiplies the panels of all ranks by the same row. The owner
of a panel multiplies its whole weight instead, with the operator that steps use, and takes the
outputs of the panel from the result. Each check takes another weight and panel, in rotation.

One all_gather carries the panels of a check and the products of the previous check, because waiting
for other ranks takes longer than multiplying.

This tests processors and kernels, not the steps: a recorded step overwrites its inputs and outputs.
It detects a processor that repeatedly computes wrong products, but not a single wrong product, and
does not test attention or products of more than one row. A bit that has flipped in a weight is sent
with the panel, so only the sums of `integrity` detect it.

In a pipeline the ranks of different stages compare products of different layers: the first layers
of all stages, the second ones, and so on.
"""

import zlib

import torch
from torch import Tensor

from parallel_llama.errors import TEST_MEMORY
from parallel_llama.model.transformer import Transformer
from parallel_llama.model.weights import stored_weights
from parallel_llama.ops import TorchOps
from parallel_llama.ops.formats import QuantWeight, Weight
from parallel_llama.parallel.collectives import Communicator
from parallel_llama.parallel.failures import IntegrityError, differing_ranks

_DENSE_ROWS = 8  # outputs in a panel of a weight that is not quantised


class ProductCheck:
    """Compares products between ranks, for a model on the CPU.

    Ranks gather their `message` and pass all messages to `receive`.

    Attributes:
        n_multiplied: how many weights this rank has multiplied. The next check compares the
            products of the last one.
    """

    def __init__(self, model: Transformer, comm: Communicator) -> None:
        self._ops, self._comm, self.n_multiplied = model.ops, comm, 0
        self._weights = [(name, w) for name, w in stored_weights(model).items() if _panel_rows(w)]
        self._first_layer = min(model.layers)
        self._is_agreed = False  # whether `_weights` has only weights of all ranks
        # The products of the last check, and the name of its weight.
        self._products, self._multiplied = torch.empty(0, dtype=torch.uint8), ""

    def message(self) -> Tensor:
        """The products of this rank in the last check, and its panel for the next one.

        Shapes: [n] uint8; n is the same on all ranks, and 0 if they have no weight in common.
        Collective: two all_gathers in the first call.
        """
        if not self._is_agreed:
            self._keep_common_weights()
        if not self._weights:
            return self._products
        _, weight, first = self._next()
        return torch.cat([self._products, _panel(weight, first).reshape(-1).view(torch.uint8)])

    @torch.inference_mode()
    def receive(self, messages: Tensor, row: Tensor) -> None:
        """Compare the products of all ranks, and multiply their panels for the next message.

        Args:
            row: the inputs, repeated to the number of inputs of the weight.

        Shapes: messages [size, n] replicated; row [dim] replicated.
        Raises: IntegrityError, on all ranks, if products differ.
        """
        if not self._weights:
            return
        n_bytes = len(self._products)
        differing = differing_ranks([sent.numpy().tobytes() for sent in messages[:, :n_bytes]])
        if differing is not None:
            raise IntegrityError(
                f"{differing} in products with {self._multiplied}, which all ranks compute alike: "
                f"{TEST_MEMORY}"
            )
        name, weight, first = self._next()
        own = _panel(weight, first)
        panels = messages[:, n_bytes:].contiguous().view(own.dtype).view(-1, *own.shape)
        n_rows, n_inputs = _panel_rows(weight), weight.n_inputs
        x = row.repeat(-(-n_inputs // len(row)))[None, :n_inputs].contiguous()
        products = _multiply(x, panels, weight, self._ops)  # [size * n_rows]
        own_products = slice(self._comm.rank * n_rows, (self._comm.rank + 1) * n_rows)
        products[own_products] = _product(x, weight, self._ops)[0, first : first + n_rows]
        # Weights with NaN or Inf give NaN, and its sign and payload depend on the kernel.
        products = torch.where(products.isnan(), torch.nan, products)
        self._products, self._multiplied = products.view(torch.uint8), name
        self.n_multiplied += 1

    def compare_all(self, row: Tensor) -> None:
        """Compare a product of each weight with `row`.

        Raises: as `receive`.
        Collective: one all_gather for each weight and one more, and those of `message`.
        """
        messages = self._comm.all_gather(self.message())  # `message` drops weights not in common
        for _ in self._weights:
            self.receive(messages, row)
            messages = self._comm.all_gather(self.message())
        self.receive(messages, row)

    def _next(self) -> tuple[str, Weight, int]:
        """The next weight that is multiplied, its name, and the first output of its panel."""
        n_rotations, index = divmod(self.n_multiplied, len(self._weights))
        name, weight = self._weights[index]
        n_rows = _panel_rows(weight)
        return name, weight, n_rotations % (weight.n_outputs // n_rows) * n_rows

    def _keep_common_weights(self) -> None:
        """Keep the weights that have a panel on every rank, in the order of their names.

        Collective: two all_gathers.
        """
        by_stage_name = {
            _name_in_stage(weight[0], self._first_layer): weight for weight in self._weights
        }
        by_hash = {
            _weight_hash(name, by_stage_name[name][1]): by_stage_name[name]
            for name in sorted(by_stage_name)
        }
        max_weights = int(self._comm.all_gather(torch.tensor([len(by_hash)])).max())
        hashes = torch.tensor([*by_hash, *[-1] * (max_weights - len(by_hash))], dtype=torch.int64)
        common = set.intersection(
            *(set(weight.tolist()) for weight in self._comm.all_gather(hashes))
        )
        self._weights = [weight for kind, weight in by_hash.items() if kind in common]
        self._is_agreed = True


def _name_in_stage(name: str, first_layer: int) -> str:
    """The name of a weight with its layer counted from the first layer of the stage.

    >>> _name_in_stage("layers.5.attention.wo.weight", 4), _name_in_stage("output.weight", 4)
    ('layers.1.attention.wo.weight', 'output.weight')
    """
    head, _, rest = name.partition(".")
    if head != "layers":
        return name
    layer, _, leaf = rest.partition(".")
    return f"layers.{int(layer) - first_layer}.{leaf}"


def _weight_hash(name: str, weight: Weight) -> int:
    """A hash of a weight's name, format and shape; ranks compare weights with equal hashes."""
    form = weight.panels if isinstance(weight, QuantWeight) else weight.values.dtype
    return zlib.crc32(repr((name, form, _panel_rows(weight), weight.n_inputs)).encode())


def _panel_rows(weight: Weight) -> int:
    """The outputs of a panel; 0 if the weight is not a matrix or has fewer outputs."""
    if isinstance(weight, QuantWeight):
        n_rows = weight.panels.n_rows
    else:
        n_rows = _DENSE_ROWS if weight.values.ndim == 2 else 0
    return n_rows if weight.n_outputs >= n_rows else 0


def _panel(weight: Weight, first: int) -> Tensor:
    """The stored panel that begins with the output `first`."""
    if isinstance(weight, QuantWeight):
        return weight.values[first // weight.panels.n_rows]
    return weight.values[first : first + _DENSE_ROWS]


def _product(x: Tensor, weight: Weight, ops: TorchOps) -> Tensor:
    """All outputs of a weight, without its `inputs` format, which may differ between stages."""
    if isinstance(weight, QuantWeight):
        return weight.apply(x, ops)
    return ops.linear(x, weight.values)


def _multiply(x: Tensor, panels: Tensor, like: Weight, ops: TorchOps) -> Tensor:
    """All outputs of several panels of weights like `like`. Shapes: x [1, in] -> [n]."""
    if not isinstance(like, QuantWeight):
        return ops.linear(x, panels.flatten(0, 1))[0]
    products = x.new_empty(1, len(panels) * like.panels.n_rows)
    ops.quant_gemm(x, panels, like.panels, products)
    return products[0]
