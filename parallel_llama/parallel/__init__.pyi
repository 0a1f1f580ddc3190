from parallel_llama.parallel.collectives import Communicator, Solo, broadcast_bytes
from parallel_llama.parallel.groups import join

__all__ = ["Communicator", "Solo", "broadcast_bytes", "join"]
