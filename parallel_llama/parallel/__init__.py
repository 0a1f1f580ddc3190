"""Ranks that compute together: groups, collectives, and the start of ranks on one host.

The only room that knows torch.distributed and fairscale's groups.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallel_llama.parallel.collectives import Communicator, Solo, broadcast_bytes
    from parallel_llama.parallel.groups import join

__all__ = ["Communicator", "Solo", "broadcast_bytes", "join"]

_HOMES = {
    "Communicator": "collectives",
    "Solo": "collectives",
    "broadcast_bytes": "collectives",
    "join": "groups",
}


def __getattr__(name: str) -> Any:
    # torch is loaded when a name needs it, so that `parallel.launch` starts ranks at once.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
