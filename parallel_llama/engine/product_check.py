"""Detects ranks that compute wrong matrix products, on the CPU with exact sums.

In a step each output is computed by one rank and gathered by all, so a wrong product reaches all
ranks, and comparing their results does not reveal it. But with exact sums an output has the same
bits on every rank that computes it. So each rank sends a panel of a weight (4 to 16 outputs, as
stored) to all ranks, and every rank multiplies the panels of all ranks by the same row. The owner
of a panel multiplies its whole weight instead, with the operator that steps use, and takes the
outputs of the panel from the result. Each check takes another weight and panel, in rotation.

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

    Attributes:
        n_compared: how many products the ranks have compared.
    """

    def __init__(self, model: Transformer, comm: Communicator) -> None:
        self._ops, self._comm, self.n_compared = model.ops, comm, 0
        self._weights = [(name, w) for name, w in stored_weights(model).items() if _panel_rows(w)]
        self._first_layer = min(model.layers)
        self._has_common_weights = False

    @torch.inference_mode()
    def compare(self, row: Tensor) -> None:
        """Multiply the next weight by `row`, repeated to its number of inputs; compare results.

        Shapes: row [dim] replicated.
        Raises: IntegrityError, on all ranks, if they differ.
        Collective: two all_gathers, and two more in the first call.
        """
        if not self._has_common_weights:
            self._keep_common_weights()
        if not self._weights:
            return
        n_rotations, index = divmod(self.n_compared, len(self._weights))
        name, weight = self._weights[index]
        n_rows, n_inputs = _panel_rows(weight), weight.n_inputs
        first = n_rotations % (weight.n_outputs // n_rows) * n_rows
        x = row.repeat(-(-n_inputs // len(row)))[None, :n_inputs].contiguous()
        panels = self._comm.all_gather(_panel(weight, first))
        products = _multiply(x, panels, weight, self._ops)  # [size * n_rows]
        own_products = slice(self._comm.rank * n_rows, (self._comm.rank + 1) * n_rows)
        products[own_products] = _product(x, weight, self._ops)[0, first : first + n_rows]
        # Weights with NaN or Inf give NaN, and its sign and payload depend on the kernel.
        products = torch.where(products.isnan(), torch.nan, products)
        computed = self._comm.all_gather(products.view(torch.uint8))
        differing = differing_ranks(
            [products_of_rank.numpy().tobytes() for products_of_rank in computed]
        )
        if differing is not None:
            raise IntegrityError(
                f"{differing} in products with {name}, which all ranks compute alike: {TEST_MEMORY}"
            )
        self.n_compared += 1

    def compare_all(self, row: Tensor) -> None:
        """Compare one product of each weight.

        Raises: as `compare`.
        Collective: as `compare`, for each weight.
        """
        self.compare(row)  # the first call drops weights that some ranks lack
        for _ in self._weights[1:]:
            self.compare(row)

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
        self._has_common_weights = True


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
    """All outputs of a weight; inputs are not rounded, because stages may round differently."""
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
