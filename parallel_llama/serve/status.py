"""The server's status for people: GET /status, which the web page shows."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import parallel_llama
from parallel_llama.serve.metrics import MINUTE_S
from parallel_llama.serve.service import Service

_PAGE_BYTES = 4096


def status_of(service: Service) -> dict[str, Any]:
    """The model, and the engine's load and memory; None for values unknown before it has loaded.

    Units: as the keys' suffixes say. `memory_bytes` is a rank's resident memory now;
    `weight_bytes`, `cuda_bytes` and `bytes_per_rank` are allocated sizes.
    """
    engine, loaded, step = service.engine, service.engine.loaded, service.engine.last_step
    ranks = [] if loaded is None else loaded.ranks
    statistics = step and step.statistics
    return {
        "model": service.names[0],
        "version": parallel_llama.__version__,
        "state": engine.state,
        "tp_size": len(ranks) or None,
        "dtype": loaded and loaded.dtype,
        "quant": loaded and loaded.quant,
        "max_model_len": service.inputs.max_seq_len,
        "step_age_s": engine.step_age_s,
        "step_ms": step and round(step.step_s * 1e3, 2),
        "tokens_per_s": round(engine.metrics.token_rate.per_s(), 1),
        "tokens_per_s_minute": round(engine.metrics.token_rate.per_s(MINUTE_S), 1),
        "n_running": statistics and statistics.n_running,
        "n_waiting": statistics and statistics.n_waiting,
        "n_restarts": engine.n_restarts,
        "kv": loaded and _kv(service),
        "ranks": [
            {
                "rank": rank.rank,
                "up": engine.state in ("ready", "draining"),
                "memory_bytes": _resident_bytes(rank.pid),
                "cuda_bytes": rank.cuda_bytes,
                "weight_bytes": rank.weight_bytes,
            }
            for rank in ranks
        ],
        "defaults": _defaults(service),
    }


def _defaults(service: Service) -> dict[str, float]:
    """The sampling parameters of a request that sets none."""
    params = service.inputs.sampling_params()
    return {name: getattr(params, name) for name in ("temperature", "top_p", "top_k", "min_p")}


def _kv(service: Service) -> dict[str, int] | None:
    loaded, step = service.engine.loaded, service.engine.last_step
    if loaded is None:
        return None
    used = cached = 0
    if step is not None:
        state = step.statistics
        n_blocks = max(1, state.n_blocks_used + state.n_blocks_cached + state.n_blocks_free)
        used = loaded.kv_tokens * state.n_blocks_used // n_blocks
        cached = loaded.kv_tokens * state.n_blocks_cached // n_blocks
    return {
        "tokens_used": used,
        "tokens_cached": cached,
        "tokens_total": loaded.kv_tokens,
        "bytes_per_rank": loaded.kv_bytes,
    }


def _resident_bytes(pid: int | None) -> int | None:
    """Resident memory of a process on this host; None if it cannot be read."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    return None
