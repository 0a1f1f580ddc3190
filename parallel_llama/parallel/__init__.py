"""Ranks that compute together: groups, collectives, and the start of ranks on one host.

The only room that knows torch.distributed and fairscale's groups. It shows its modules and no names
of its own, so that `parallel.launch` starts ranks without torch.
"""
