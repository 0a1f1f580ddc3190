"""What is asked of the model and what comes back: requests, completions and stop conditions.

Plain data and text, no torch. It does not know how tokens are drawn (see `sampling`) or when a
request runs (see `scheduler`). Every value that reaches a Request was checked here, so nothing
later has to check it again.
"""

import hashlib
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from parallel_llama.errors import UsageError

FinishReason = Literal["stop", "length", "interrupted", "cancelled", "timeout", "no_token"]
GrammarKind = Literal["json_schema", "regex", "lark"]

# Below this the division by the temperature only costs digits: the draw is greedy already.
MIN_TEMPERATURE = 1e-6
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 4096  # of all stop strings of one request together
MAX_STOP_IDS = 4096
MAX_CHOICES = 128
MAX_BIASES = 4096
MAX_BIAS = 100.0
MAX_PENALTY = 2.0  # of presence_penalty and frequency_penalty, to either side
# Beyond these a float32 logit could become infinite, and no penalty that is meant comes close.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
MAX_SALT_BYTES = 256
MAX_GRAMMAR_BYTES = 64 << 10
MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True)
class Grammar:
    """What a completion must look like, as its author wrote it; checked for its size alone.

    Raises: UsageError for an unknown kind, and for a text that is empty or too long.
    """

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        kinds = get_args(GrammarKind)
        if self.kind not in kinds:
            raise UsageError(f"grammar kind {_shown(self.kind)} is unknown; use {', '.join(kinds)}")
        _check_text("the grammar", self.text, MAX_GRAMMAR_BYTES)
        if not self.text:
            raise UsageError("the grammar is empty; leave it out, or write one")


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are drawn and when it ends; checked when it is made.

    What changes the logits comes in this order: logit_bias; min_tokens and grammar, which forbid
    tokens; repetition_penalty; presence_penalty and frequency_penalty; temperature; and then the
    filters top_k, top_p and min_p (relative to the likeliest token). A temperature below
    MIN_TEMPERATURE is greedy: it takes the largest logit and ignores the filters.

    `n` completions are drawn, each a choice of its own. Before `min_tokens` tokens neither an eos
    or stop id can be drawn nor a stop string ends the completion. `repetition_penalty` divides the
    positive and multiplies the negative logits of every token of prompt and completion;
    `presence_penalty` is subtracted once, and `frequency_penalty` once per occurrence, from those
    of the completion. `logprobs` and `prompt_logprobs` ask for that many alternatives beside the
    chosen token, and beside each token of the prompt. Requests with different `cache_salt` share
    nothing through the prefix cache. `stop` and `stop_token_ids` may be given as any list, and
    `logit_bias` as any mapping of token ids to biases.

    Raises: UsageError for a value of the wrong type or out of range.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # 0: off
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    min_tokens: int = 0
    repetition_penalty: float = 1.0  # 1: off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias), by token id
    grammar: Grammar | None = None
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        _check_int("max_tokens", self.max_tokens, 1, MAX_TOKEN_ID)
        _check_int("min_tokens", self.min_tokens, 0, MAX_TOKEN_ID)
        if self.min_tokens > self.max_tokens:
            raise UsageError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; "
                "lower it or raise max_tokens"
            )
        _check_int("n", self.n, 1, MAX_CHOICES)
        _check_int("top_k", self.top_k, 0, MAX_TOKEN_ID, "; 0 turns it off")
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**63 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.cache_salt is not None:
            _check_text("cache_salt", self.cache_salt, MAX_SALT_BYTES)
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise UsageError(
                f"grammar={_shown(self.grammar)} is no Grammar; give its kind and text"
            )
        if not isinstance(self.ignore_eos, bool):
            raise UsageError(f"ignore_eos={self.ignore_eos!r} is neither true nor false")
        numbers = {
            "temperature": _checked_float("temperature", self.temperature, 0.0, math.inf),
            "top_p": _checked_float("top_p", self.top_p, 0.0, 1.0),
            "min_p": _checked_float("min_p", self.min_p, 0.0, 1.0),
            "repetition_penalty": _checked_float(
                "repetition_penalty",
                self.repetition_penalty,
                MIN_REPETITION_PENALTY,
                MAX_REPETITION_PENALTY,
                "; 1 turns it off",
            ),
            "presence_penalty": _checked_penalty("presence_penalty", self.presence_penalty),
            "frequency_penalty": _checked_penalty("frequency_penalty", self.frequency_penalty),
        }
        if numbers["top_p"] == 0:
            raise UsageError("top_p=0 keeps no token; use temperature 0 for greedy decoding")
        # The fields are frozen; lists and whole numbers are stored in the declared types.
        for name, value in numbers.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "stop", _checked_stop(self.stop))
        object.__setattr__(self, "stop_token_ids", _checked_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _checked_biases(self.logit_bias))

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE

    @property
    def is_filtered(self) -> bool:
        """Whether any filter can take a token away before the draw."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def has_penalties(self) -> bool:
        """Whether a draw depends on which tokens came before it, beside the model's own logits."""
        return self.repetition_penalty != 1 or self.penalizes_completion

    @property
    def penalizes_completion(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True)
class Request:
    """One prompt as all ranks know it: token ids, and everything left open resolved."""

    index: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]

    def __post_init__(self) -> None:
        if self.index < 0:
            raise UsageError(f"request index {self.index} is negative; count from 0")
        if not self.prompt:
            raise UsageError(f"request {self.index}: {_EMPTY_PROMPT}")
        for token in (min(self.prompt), max(self.prompt)):
            if not 0 <= token <= MAX_TOKEN_ID:
                raise UsageError(
                    f"request {self.index}: prompt token id {token} is not in 0..{MAX_TOKEN_ID}"
                )

    def banned_ids(self, n_drawn: int) -> frozenset[int]:
        """The ids that cannot be drawn as the next token of a completion of `n_drawn` tokens."""
        return self.stop_ids if n_drawn < self.params.min_tokens else frozenset()


@dataclass(frozen=True)
class TokenLogprob:
    """A chosen token's log-probability and its likeliest alternatives, likeliest first.

    Natural logarithms of the model's own distribution, log_softmax of its logits before biases,
    penalties, masks, temperature and filters. `top` holds (token, logprob) pairs, never the chosen
    token itself and no token of probability 0.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Completion:
    """One choice of what a request produced.

    `tokens` holds every id that was drawn, the eos or stop id or the one that completed a stop
    string included; `text` ends before them. So `tokens` may decode to more than `text`.
    `prompt_logprobs` has an entry per token of the prompt; the first, which nothing predicts, is
    None.
    """

    index: int
    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    n_prompt_tokens: int
    logprobs: tuple[TokenLogprob, ...] | None = None
    choice: int = 0  # which of the request's n_choices
    n_choices: int = 1
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """The line of `generate --json`.

        `choice` is there only beside others, log-probabilities only where they were asked for.
        """
        line: dict[str, Any] = {
            "index": self.index,
            "text": self.text,
            "tokens": list(self.tokens),
            "finish_reason": self.finish_reason,
            "n_prompt_tokens": self.n_prompt_tokens,
        }
        if self.n_choices > 1:
            line["choice"] = self.choice
        if self.logprobs is not None:
            line["logprobs"] = [_logprob_json(each) for each in self.logprobs]
        if self.prompt_logprobs is not None:
            line["prompt_logprobs"] = [
                each and _logprob_json(each) for each in self.prompt_logprobs
            ]
        return line


def check_fits(n_prompt: int, params: SamplingParams, max_seq_len: int) -> None:
    """Check that prompt and completion together fit into the context.

    Raises: UsageError with both numbers and what to lower, and for an empty prompt.
    """
    if n_prompt == 0:
        raise UsageError(_EMPTY_PROMPT)
    if n_prompt + params.max_tokens <= max_seq_len:
        return
    room = max_seq_len - n_prompt
    remedy = (
        f"lower max_tokens to {room}"
        if room > 0
        else f"shorten the prompt to at most {max_seq_len - 1} tokens"
    )
    raise UsageError(
        f"a prompt of {n_prompt} tokens and max_tokens={params.max_tokens} need "
        f"{n_prompt + params.max_tokens} positions and the context has {max_seq_len}; "
        f"{remedy} or raise max_seq_len"
    )


def resolve_seed(params: SamplingParams, run_seed: int, line: int) -> int:
    """The request's own seed, else one made of the run's seed and the request's line number.

    Returns: an integer in [-2**63, 2**63).
    """
    if params.seed is not None:
        return params.seed
    digest = hashlib.blake2b(f"seed {run_seed} {line}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def resolve_stop_ids(params: SamplingParams, eos_ids: Iterable[int]) -> frozenset[int]:
    """The ids that end a request: the model's eos ids unless ignored, and the request's own."""
    return params.stop_token_ids | (frozenset() if params.ignore_eos else frozenset(eos_ids))


class StopText:
    """Finds stop strings in a text that arrives in pieces and shows only what is safe to show.

    The occurrence that is complete first wins, the longest where several end together, and the
    text is cut before it; so the result does not depend on how the text is split into pieces. The
    longest end of the text that begins a stop string is held back.

    Cost: building takes one step per character of the stop strings; a push takes an amortised
    constant number of steps per character, whatever the number of stop strings.
    Source: Aho and Corasick, Efficient string matching, 1975, algorithms 2 and 3.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        # State 0 is the empty prefix. The held-back text of a state is its prefix of a stop string.
        self._next: list[dict[str, int]] = [{}]
        self._prefix: list[tuple[str, int]] = [("", 0)]
        self._n_match = [0]  # length of the longest stop string that ends in this state; 0: none
        for string in stop:
            self._add(string)
        self._fail = [0] * len(self._next)
        self._link()
        self._state = 0
        self._found = False

    @property
    def found(self) -> bool:
        """Whether a stop string is complete."""
        return self._found

    def push(self, piece: str) -> str:
        """Take the next piece and return the text that is now safe to show, without a stop string.

        Returns: "" from the first stop string on.
        """
        if self._found:
            return ""
        held, n_held = self._prefix[self._state]
        for n_read, char in enumerate(piece, 1):
            self._state = self._step(self._state, char)
            n_match = self._n_match[self._state]
            if n_match:
                self._found = True
                return _head(held, n_held, piece, n_held + n_read - n_match)
        _, n_holding = self._prefix[self._state]
        return _head(held, n_held, piece, n_held + len(piece) - n_holding)

    def flush(self) -> str:
        """Return what was held back, at the end of the text; "" after a stop string."""
        if self._found:
            return ""
        held, n_held = self._prefix[self._state]
        self._state = 0
        return held[:n_held]

    def _add(self, string: str) -> None:
        state = 0
        for depth, char in enumerate(string, 1):
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._prefix.append((string, depth))
                self._n_match.append(0)
            state = self._next[state][char]
        self._n_match[state] = len(string)

    def _link(self) -> None:
        """Point each state to the longest proper suffix of its prefix that is a prefix too."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                self._fail[child] = self._step(self._fail[state], char)
                queue.append(child)
            self._n_match[state] = self._n_match[state] or self._n_match[self._fail[state]]

    def _step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(char, 0)


_EMPTY_PROMPT = "the prompt is empty; give at least one token"


def _check_int(name: str, value: object, low: int, high: int, hint: str = "") -> None:
    # bool is an int to Python; `top_k=True` is a mistake to a person.
    if type(value) is not int:
        raise UsageError(f"{name}={_shown(value)} is not a whole number{hint}")
    if not low <= value <= high:
        raise UsageError(f"{name}={value} is out of range; use {low} to {high}{hint}")


def _checked_float(name: str, value: object, low: float, high: float, hint: str = "") -> float:
    if type(value) not in (int, float):
        raise UsageError(f"{name}={_shown(value)} is not a number")
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high:
        allowed = f"{low:g} to {high:g}" if math.isfinite(high) else f"a finite number from {low:g}"
        raise UsageError(f"{name}={_shown(value)} is out of range; use {allowed}{hint}")
    return number


def _checked_penalty(name: str, value: object) -> float:
    return _checked_float(name, value, -MAX_PENALTY, MAX_PENALTY, "; 0 turns it off")


def _check_text(name: str, value: object, max_bytes: int) -> None:
    if not isinstance(value, str):
        raise UsageError(f"{name}={_shown(value)} is no text")
    try:
        n_bytes = len(value.encode())
    except UnicodeEncodeError as error:
        raise UsageError(f"{name} holds half a surrogate pair, which is no character") from error
    if n_bytes > max_bytes:
        raise UsageError(f"{name} has {n_bytes} bytes; use at most {max_bytes}")


def _checked_stop(value: object) -> tuple[str, ...]:
    # A bare string is refused: tuple() would take it apart into letters.
    if not isinstance(value, (list, tuple)) or not all(isinstance(each, str) for each in value):
        raise UsageError(f"stop={_shown(value)} is not a list of strings; write it as ['...']")
    if "" in value:
        raise UsageError("stop holds an empty string, which is everywhere; leave it out")
    n_chars = sum(map(len, value))
    if len(value) > MAX_STOP_STRINGS or n_chars > MAX_STOP_CHARS:
        raise UsageError(
            f"stop holds {len(value)} strings of {n_chars} characters together; use at most "
            f"{MAX_STOP_STRINGS} strings and {MAX_STOP_CHARS} characters"
        )
    return tuple(value)


def _checked_ids(value: object) -> frozenset[int]:
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise UsageError(f"stop_token_ids={_shown(value)} is not a list of token ids")
    if len(value) > MAX_STOP_IDS:
        raise UsageError(f"stop_token_ids holds {len(value)} ids; use at most {MAX_STOP_IDS}")
    for token in value:
        _check_int("stop_token_ids", token, 0, MAX_TOKEN_ID)
    return frozenset(value)


def _checked_biases(value: object) -> tuple[tuple[int, float], ...]:
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, tuple) and all(isinstance(p, tuple) and len(p) == 2 for p in value):
        pairs = list(value)
    else:
        raise UsageError(f"logit_bias={_shown(value)} does not map token ids to biases")
    if len(pairs) > MAX_BIASES:
        raise UsageError(f"logit_bias holds {len(pairs)} tokens; use at most {MAX_BIASES}")
    for token, _ in pairs:
        _check_int("logit_bias token id", token, 0, MAX_TOKEN_ID)
    biases = {
        token: _checked_float(f"logit_bias of token {token}", bias, -MAX_BIAS, MAX_BIAS)
        for token, bias in pairs
    }
    if len(biases) < len(pairs):
        raise UsageError("logit_bias holds a token id more than once; add its biases up")
    return tuple(sorted(biases.items()))


def _logprob_json(each: TokenLogprob) -> dict[str, Any]:
    return {"token": each.token, "logprob": each.logprob, "top": [list(t) for t in each.top]}


def _shown(value: object) -> str:
    """A value as an error shows it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _head(held: str, n_held: int, piece: str, n_chars: int) -> str:
    """The first characters of held[:n_held] + piece, without copying more than those."""
    return held[: min(n_held, n_chars)] + piece[: max(n_chars - n_held, 0)]
