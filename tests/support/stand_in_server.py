"""A server with the web page and fixed answers, for tests of the page.

The last question selects the answer: one of `ANSWERS`, or a case of `_chat`. `StandIn.requests`
records the requests of the page.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from parallel_llama.serve.page_files import page_routes

MODEL = "stand-in"
CONTEXT = 131072
FITTING = 8192  # tokens that fit into the KV cache

ANSWERS = {
    "hello": "Hello! What would you like to know?",
    "markdown": (
        "# Title\n\nSome **bold** text and `code`.\n\n"
        "```python\ndef leap(year):\n"
        "    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)\n```\n\n"
        "- [x] one\n- two\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"
    ),
    "hostile": (
        "<img src=x onerror=\"window.ran='img'\">\n\n<script>window.ran='script'</script>\n\n"
        "[link](javascript:window.ran='link') [data](data:text/html,x) [path](/status)\n\n"
        "![picture](http://elsewhere.invalid/p.png \"a' onerror='window.ran=1\")\n\n"
        "<svg/onload=window.ran='svg'><iframe srcdoc=\"<script>parent.ran='iframe'</script>\">\n\n"
        '[good](https://example.org/) `<b>`\n\n```html" onmouseover="window.ran=2\n</code></pre>'
        "<style>body{display:none}</style>\n```\n"
    ),
    "formulas": (
        r"Inline $a^2 + b^2$ and \(\frac{1}{2}\), for $5 and $10, or \$3."
        "\n\n"
        r"\[ \boxed{\begin{aligned} x &= 1 \\ y &= 22 \end{aligned}} \]"
        "\n\n"
        "Then\n$$\n\\sum_{i=1}^n i\n= \\frac{n(n+1)}{2}\n$$\nand `$code$`.\n"
    ),
    "hostile formulas": (
        r"$\href{javascript:window.ran=1}{x}$ $\includegraphics{http://elsewhere.invalid/p.png}$ "
        r"$\htmlStyle{position:fixed}{x}$ $\fcolorbox{red}{white}{x}$ $\text{<img src=x>}$ "
        r"$\def\a{\a\a}\a$ $\rule{1e6em}{1e6em}$ $\nonsense{$ "
        + "$"
        + "{" * 3000
        + "}" * 3000
        + "$"
        "\n\n```js\nconst x = '<img src=x onerror=window.ran=2>';\n```\n"
    ),
}

STATUS: dict[str, Any] = {
    "model": MODEL,
    "version": "0.1.0",
    "state": "ready",
    "tp_size": 2,
    "dtype": "float32",
    "quant": "none",
    "max_model_len": CONTEXT,
    "step_age_s": 0.02,
    "step_ms": 31.2,
    "tokens_per_s": 120.1,
    "tokens_per_s_minute": 34.5,
    "n_running": 1,
    "n_waiting": 0,
    "n_restarts": 0,
    "kv": {
        "tokens_used": 1204,
        "tokens_cached": 9310,
        "tokens_total": 40000,
        "bytes_per_rank": 120 << 20,
    },
    "ranks": [
        {"rank": 0, "up": True, "memory_bytes": 505 << 20, "weight_bytes": 265 << 20},
        {"rank": 1, "up": True, "memory_bytes": 497 << 20, "weight_bytes": 257 << 20},
    ],
    "defaults": {"temperature": 0.2, "top_p": 1.0, "top_k": 0},
}


class StandIn:
    """The server's address, its recorded requests, and its status (None: it has no /status).

    Its tokenizer counts every word as a token.
    """

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        self.n_tokenized = 0
        self.status: dict[str, Any] | None = STATUS

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                *page_routes(),
                Route("/status", self._status),
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/tokenize", self._tokenize, methods=["POST"]),
            ]
        )

    async def _status(self, _request: Request) -> Response:
        return Response(status_code=404) if self.status is None else JSONResponse(self.status)

    async def _models(self, _request: Request) -> Response:
        model = {"id": MODEL, "object": "model", "max_model_len": CONTEXT}
        model["max_fitting_tokens"] = FITTING
        return JSONResponse({"object": "list", "data": [model]})

    async def _tokenize(self, request: Request) -> Response:
        self.n_tokenized += 1
        messages = (await request.json())["messages"]
        n = sum(len(message["content"].split()) for message in messages)
        return JSONResponse({"count": n, "max_model_len": CONTEXT})

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        if body.get("continue_final_message"):
            return _stream(_continued(body))
        match body["messages"][-1]["content"].split():
            case ["refuse", status]:
                message = f"the server said {status}"
                return JSONResponse(
                    {"error": {"message": message}}, int(status), {"Retry-After": "7"}
                )
            case ["break"]:
                pieces = _events(["Half an "], end=False)
            case ["cut"]:
                pieces = _events(["```python\n", "def f():\n", "    "], reason="length")
            case ["cut", "and", "fail"]:
                pieces = _events(["Half an"], reason="length")
            case ["full"]:
                pieces = _events(["Half an"], reason="length", n_prompt=FITTING - 1)
            case ["think"]:
                pieces = _events(["Then ", "that."], reasoning="First this.")
            case ["deep"]:
                pieces = _events([">" * 4000] * 6)
            case ["slow"]:
                pieces = _events(["*a_" * 400] * 20)
            case ["fail"]:
                error = {"error": {"message": "rank 1 is lost"}}
                pieces = _events(["Half an "], end=False, last=error)
            case ["count"]:
                numbers = [f"{number} " for number in range(10_000)]
                pieces = _events(["*All* numbers:\n\n", *numbers], pause=0.02)
            case _:
                text = ANSWERS.get(body["messages"][-1]["content"], f"Answer {len(self.requests)}.")
                pieces = _events([text[at : at + 7] for at in range(0, len(text), 7)])
        return _stream(pieces)


def _stream(pieces: AsyncIterator[str]) -> Response:
    return StreamingResponse(pieces, media_type="text/event-stream")


def _continued(body: dict[str, Any]) -> AsyncIterator[str]:
    """The continuation of the answer to the last question."""
    if body["messages"][-2]["content"] == "cut and fail":
        return _events([], end=False, last={"error": {"message": "rank 1 is lost"}})
    return _events(["\n    return", " 7\n", "```"])


async def _events(
    pieces: list[str],
    pause: float = 0.002,
    end: bool = True,
    last: dict[str, Any] | None = None,
    reason: str = "stop",
    n_prompt: int = 20,
    reasoning: str = "",
) -> AsyncIterator[str]:
    """Chunks of reasoning and of text; then the finish, the usage and [DONE], or `last`."""
    for word in reasoning.split(" ") if reasoning else ():
        yield _event({"choices": [{"index": 0, "delta": {"reasoning_content": f"{word} "}}]})
    for piece in pieces:
        yield _event({"choices": [{"index": 0, "delta": {"content": piece}}]})
        await asyncio.sleep(pause)
    if end:
        yield _event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        n = len(pieces)
        usage = {"prompt_tokens": n_prompt, "completion_tokens": n, "total_tokens": n_prompt + n}
        yield _event({"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"
    elif last is not None:
        yield _event(last)


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


@contextmanager
def stand_in_server() -> Iterator[StandIn]:
    """A stand-in on a free port of the loopback interface, in another thread."""
    stand_in = StandIn()
    config = uvicorn.Config(
        stand_in.app(), host="127.0.0.1", port=0, log_level="warning", lifespan="off"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise RuntimeError("the stand-in server did not start")
            threading.Event().wait(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        stand_in.url = f"http://127.0.0.1:{port}/"
        yield stand_in
    finally:
        server.should_exit = server.force_exit = True
        thread.join()
