"""`serve`: runs an OpenAI-compatible HTTP server."""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from parallel_llama.cli.arguments import Flag, Flags, Job, Verb, warn
from parallel_llama.cli.host_checks import warn_of_host
from parallel_llama.cli.model import (
    ADAPTER,
    CACHE,
    DRAFTS,
    ELASTIC,
    LOADING,
    MODEL,
    RANKS,
    SPARES,
    TIMEOUT,
    adapters_of,
    check_model,
    in_dtype,
    llm_config,
)
from parallel_llama.cli.parsers import filled_text, number, one_of, origin, whole
from parallel_llama.cli.session import lead, leads, show_line
from parallel_llama.config.adapter import load_served_adapters
from parallel_llama.errors import UsageError, counted
from parallel_llama.files.bounded_files import expanded, is_folder
from parallel_llama.files.model_files import model_label
from parallel_llama.parallel.failures import FAILED, report_error
from parallel_llama.parallel.rank_env import is_started_as_rank
from parallel_llama.serve.log import FORMATS, log_to_stderr

if TYPE_CHECKING:
    from parallel_llama.engine.input_processor import InputProcessor
    from parallel_llama.llm import LLM
    from parallel_llama.serve.engine_child import AttachedEngine, EngineChild

logger = logging.getLogger(__name__)

HOST: Flag[str] = Flag("host", "address to listen on", filled_text, "ADDRESS", "127.0.0.1")
PORT: Flag[int] = Flag("port", "port to listen on; 0 for any free port", whole(0, 65535), "N", 8000)
API_KEY_FILE: Flag[str | None] = Flag(
    "api-key-file", "file of API keys, one per line; clients must send one key",
    filled_text, "FILE", default_text="none, so that no key is required",
)  # fmt: skip
ORIGINS: Flag[list[str]] = Flag(
    "allowed-origin", "origin of web pages that may use the server (CORS), such as "
    "https://chat.example.org; * for all",
    origin, "ORIGIN", default_text="only the server's own page", repeatable=True,
)  # fmt: skip
MODEL_NAME: Flag[str | None] = Flag(
    "served-model-name", "name of the model for clients",
    filled_text, "NAME", default_text="that of --model",
)  # fmt: skip
ADAPTER_ROOT: Flag[str | None] = Flag(
    "adapter-root", "folder in which clients may load LoRA adapters while the server runs "
    "(POST /v1/load_lora_adapter)",
    filled_text, "FOLDER", default_text="none, so that no client can load one", subject="model",
)  # fmt: skip
MAX_REQUESTS: Flag[int] = Flag(
    "max-requests", "maximum completions that are prepared, waiting or running; further requests "
    "get status 429. The limit is 7/8 N for large requests and requests for several "
    "completions, and 9/8 N for a small request of a client without unfinished completions",
    whole(1, 1 << 16), "N", 256,
)  # fmt: skip
RESTARTS: Flag[int | None] = Flag(
    "restarts", "maximum restarts of a failed engine within 10 minutes, if this command starts the "
    "ranks",
    whole(0, 1000), "K", default_text="3",
)  # fmt: skip
DRAIN: Flag[float] = Flag(
    "drain", "how long to wait for running requests after SIGTERM or Ctrl-C",
    number(0, 1e6), "SECONDS", 30.0,
)  # fmt: skip

LOG_FORMAT: Flag[str] = Flag(
    "log-format", "text, or json for a JSON object per line", one_of(*FORMATS), "FORMAT",
    default="text",
)  # fmt: skip

MAX_RESTARTS = 3  # without --restarts
_ENGINE = "parallel_llama.engine_process"  # the module that the engine's process runs
_REPORT_MARGIN_S = 5.0  # so that the ranks report a late rank before the frontend stops the engine


def prepare(flags: Flags) -> Job:
    """Checks the model, the plan and the address, and returns the job."""
    from parallel_llama.serve.access import is_loopback, read_keys
    from parallel_llama.serve.server import bound_socket

    log_to_stderr(flags[LOG_FORMAT])
    inputs, n_ranks = check_model(flags)
    _names(flags)
    _require_adapter_root(flags)
    warn_of_host(flags, flags[MODEL], inputs.files, inputs.args, n_ranks)
    if not leads():
        return Job(lambda: _follow(flags, inputs), n_ranks)
    key_file = flags[API_KEY_FILE]
    keys = [] if key_file is None else read_keys(key_file)
    if not keys and not is_loopback(flags[HOST]):
        warn(
            f"--host {flags[HOST]} without --{API_KEY_FILE.name}: anyone who can reach this "
            "machine can use the server"
        )
    if "*" in flags[ORIGINS] and not keys:
        warn(
            f"--{ORIGINS.name} * without --{API_KEY_FILE.name}: every web page in a browser on "
            "this machine can use the server"
        )
    listener = bound_socket(flags[HOST], flags[PORT])
    restarts = flags[RESTARTS]
    if is_started_as_rank():
        if restarts:
            warn(
                f"--{RESTARTS.name} {restarts} has no effect: this process was started as a rank, "
                "so the server ends if the engine fails"
            )
        return Job(lambda: _serve_as_rank(flags, inputs, listener, keys), n_ranks)
    config = llm_config(flags, tp_size=n_ranks)

    def run() -> int:
        from parallel_llama.serve.engine_child import EngineChild

        _show(flags, f"loading {flags[MODEL]}")
        return _run_frontend(
            flags,
            inputs,
            listener,
            keys,
            lambda adapters: EngineChild(
                _ENGINE, {**config.to_json(), "adapters": dict(adapters)}, flags[LOG_FORMAT]
            ),
            MAX_RESTARTS if restarts is None else restarts,
        )

    return Job(run)


def _run_frontend(
    flags: Flags,
    inputs: "InputProcessor",
    listener: socket.socket,
    keys: Sequence[str],
    start: "Callable[[Mapping[str, str]], EngineChild | AttachedEngine]",
    restarts: int,
) -> int:
    """Runs the HTTP server for an engine process; returns the exit code."""
    import uvloop

    from parallel_llama.request import SamplingParams
    from parallel_llama.serve.access import Access, allowing_origins
    from parallel_llama.serve.app import make_app
    from parallel_llama.serve.engine_client import EngineClient
    from parallel_llama.serve.metrics import Metrics
    from parallel_llama.serve.server import serve
    from parallel_llama.serve.service import Service
    from parallel_llama.serve.wire import Loaded

    # Tokenizers must encode in the calling thread, which has its own priority.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    names = _names(flags)
    engine = EngineClient(
        start,
        inputs.request(0, [0], SamplingParams(max_tokens=1)),
        Metrics(names[0]),
        adapters=adapters_of(flags),
        check_adapter=lambda name, folder: load_served_adapters({name: folder}, inputs.args),
        max_choices=flags[MAX_REQUESTS],
        restarts=restarts,
        step_timeout_s=flags[TIMEOUT] + _REPORT_MARGIN_S,
    )

    def announce(loaded: Loaded) -> None:
        inputs.n_cache_tokens = loaded.longest
        host, port = listener.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        n_ranks, dtype = len(loaded.ranks), in_dtype(loaded.dtype, loaded.quant)
        line = f"serving {names[0]} at http://{host}:{port} ({counted(n_ranks, 'rank')}, {dtype})"
        _show(flags, line, partial(print, file=sys.stderr, flush=True))

    engine.on_loaded = announce
    root = flags[ADAPTER_ROOT]
    service = Service(names, inputs, engine, None if root is None else expanded(root))
    access = Access(make_app(service), keys, flags[HOST])
    app = allowing_origins(access, flags[ORIGINS])
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    with listener:
        serving = serve(app, engine, listener, flags[DRAIN], has_launcher=is_started_as_rank())
        return loop.run_until_complete(serving)


def _serve_as_rank(
    flags: Flags, inputs: "InputProcessor", listener: socket.socket, keys: Sequence[str]
) -> int:
    """Rank 0 under a launcher: runs the engine, and forks the HTTP server.

    It forks before the engine starts a thread. By then torch is loaded only with --verify, or if
    the vocabulary's size in a Meta folder was read from the weights; see `cli.model`.
    """
    from parallel_llama.serve.engine_child import AttachedEngine

    engine_socket, frontend_socket = socket.socketpair()
    frontend_pid = os.fork()
    if frontend_pid == 0:
        os.setpgid(0, 0)  # rank 0 forwards signals; signals to its group must not arrive twice
        engine_socket.close()
        os._exit(
            _run_frontend(
                flags, inputs, listener, keys, lambda _: AttachedEngine(frontend_socket), restarts=0
            )
        )
    frontend_socket.close()
    listener.close()
    # The HTTP server handles signals: it drains, then closes the engine.
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, lambda received, _: os.kill(frontend_pid, received))

    def work(llm: "LLM") -> int:
        from parallel_llama.engine_process import EngineProcess
        from parallel_llama.serve.wire import FrameSocket

        EngineProcess(llm.ranks, FrameSocket(engine_socket)).run()
        return 0

    try:
        code = lead(flags, inputs, work, show=partial(_show, flags))
    finally:
        engine_socket.close()  # ends the HTTP server if `lead` has failed
        _, status = os.waitpid(frontend_pid, 0)  # the port must be free when this process exits
    return code or _frontend_code(status)


def _show(flags: Flags, line: str, show_text: Callable[[str], None] = show_line) -> None:
    """Writes a line about the start to stderr, or to the log with --log-format json."""
    if flags[LOG_FORMAT] == "json":
        logger.info(line)
    else:
        show_text(line)


def _frontend_code(status: int) -> int:
    """The exit code for the wait status of the HTTP server. Reports a signal that killed it."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    report_error(f"the HTTP server was killed by {signal.Signals(-code).name}")
    return FAILED


def _follow(flags: Flags, inputs: "InputProcessor") -> int:
    """Runs a rank above 0 until rank 0 closes the engine."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return lead(flags, inputs, lambda _: 0)


def _require_adapter_root(flags: Flags) -> None:
    """Raises: UsageError if --adapter-root is not a folder, or is given with --elastic."""
    root = flags[ADAPTER_ROOT]
    if root is not None and not is_folder(expanded(root)):
        raise UsageError(f"--{ADAPTER_ROOT.name} {root}: not a folder; give one that exists")
    if root is not None and flags[ELASTIC]:
        raise UsageError(
            f"--{ADAPTER_ROOT.name} and --elastic cannot be combined: a process that replaces a "
            "rank would not have the adapters; drop one"
        )


def _names(flags: Flags) -> list[str]:
    """The model's names for clients: --served-model-name, or its file name and its path.

    Raises: UsageError for an adapter with a name of the model.
    """
    model, served_name = flags[MODEL], flags[MODEL_NAME]
    usual_names = dict.fromkeys((model_label(model), model))
    names = [served_name] if served_name is not None else list(usual_names)
    for name in adapters_of(flags):
        if name in names:
            raise UsageError(
                f"--adapter {name}=..: the model has this name; give the adapter another name, or "
                f"the model another --{MODEL_NAME.name}"
            )
    return names


VERB = Verb(
    "serve",
    "Serves a model over HTTP: an OpenAI-compatible API and a web page.",
    "[MODEL] [--nproc N] [flags]",
    (
        MODEL, MODEL_NAME, *DRAFTS, ADAPTER, ADAPTER_ROOT, HOST, PORT, API_KEY_FILE, ORIGINS,
        MAX_REQUESTS, RESTARTS, DRAIN, LOG_FORMAT, *RANKS, ELASTIC, SPARES, *CACHE, *LOADING,
    ),
    "parallel-llama serve --nproc 2",
    prepare,
    argument=MODEL,
)  # fmt: skip
