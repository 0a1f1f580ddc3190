"""Process groups, collectives, and the launch of ranks on one host.

Only this package uses torch.distributed and fairscale's groups. It exports modules and no names, so
that `parallel.launch` can start ranks without importing torch.
"""
