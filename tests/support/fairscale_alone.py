"""fairscale's groups in a process with a single rank; real ranks already have them."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from fairscale.nn.model_parallel import initialize as fs_init
from torch.distributed import HashStore


@contextmanager
def fairscale_alone() -> Iterator[None]:
    """Groups of one rank during the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        fs_init.initialize_model_parallel(1)
        try:
            yield
        finally:
            fs_init.destroy_model_parallel()
            dist.destroy_process_group()
