"""Meta's own Transformer, in float64, at the model-parallel size of its checkpoint.

It is separate from the transformers oracle, so that rank processes need not import transformers.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fairscale.nn.model_parallel import initialize as fs_init
from float64_mode import float64_throughout
from llama_models.llama3.args import ModelArgs
from llama_models.llama3.model import Transformer
from torch import Tensor
from torch.distributed import HashStore

from parallel_llama.parallel.collectives import Communicator


def meta_logits(comm: Communicator, folder: Path, tokens: Sequence[int]) -> Tensor:
    """Logits of Meta's own Transformer on a Meta folder, this rank loading its own file.

    It needs no patch for the CPU, because fairscale's layers reduce over any group.

    Shapes: [T, vocab_size] float64, replicated.
    Collective: fairscale's model-parallel group, of as many ranks as the folder has files.
    """
    params = json.loads((folder / "params.json").read_text())
    args = ModelArgs(**params, max_batch_size=1, max_seq_len=len(tokens))
    weights = torch.load(
        folder / f"consolidated.{comm.rank:02d}.pth", weights_only=True, map_location="cpu"
    )
    with float64_throughout():
        model = Transformer(args)
        model.load_state_dict(weights)
        logits: Tensor = model(torch.tensor([list(tokens)]), 0)[0]
    return logits.clone()


@contextmanager
def fairscale_alone() -> Iterator[None]:
    """fairscale's groups in a process with a single rank; real ranks already have them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        fs_init.initialize_model_parallel(1)
        try:
            yield
        finally:
            fs_init.destroy_model_parallel()
            dist.destroy_process_group()
