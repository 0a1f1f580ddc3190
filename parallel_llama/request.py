"""Sampling parameters, requests and completions: validated plain data, without torch.

Every value of a Request is checked here, so that no later code has to check it again.
"""

import hashlib
import math
import operator
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any, Literal, get_args

from parallel_llama.errors import ContextExceeded, UsageError, counted, shown

FinishReason = Literal["stop", "length", "interrupted", "cancelled", "timeout", "no_token"]
GrammarKind = Literal["json_schema", "regex", "lark"]

# Below this temperature sampling is greedy: dividing by it would only lose precision.
MIN_TEMPERATURE = 1e-6
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 4096  # of all stop strings of one request together
MAX_STOP_IDS = 4096
MAX_ALLOWED_IDS = 1 << 17
MAX_BAD_WORDS = 1024
MAX_BAD_CHARS = 1 << 16  # of all bad words of one request together
MAX_CHOICES = 128
MAX_BIASES = 4096
MAX_BIAS = 100.0
MAX_PENALTY = 2.0  # absolute value of presence_penalty and frequency_penalty
# Beyond these limits a float32 logit could overflow.
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
MAX_SALT_BYTES = 256
MAX_GRAMMAR_BYTES = 64 << 10
MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True)
class Grammar:
    """A grammar that a completion must match; only its size is checked here.

    Args:
        kind: json_schema, regex or lark.
        text: the grammar's source.

    Raises: UsageError for an unknown kind, and for a source that is empty or too long.
    """

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        kinds = get_args(GrammarKind)
        if self.kind not in kinds:
            raise UsageError(f"grammar kind {shown(self.kind)} is unknown; use {', '.join(kinds)}")
        _checked_text("the grammar's text", self.text, MAX_GRAMMAR_BYTES)
        if not self.text:
            raise UsageError("the grammar is empty; leave it out, or write one")


class _ShortRepr:
    """A repr of a dataclass without the fields that have their default value."""

    def __repr__(self) -> str:
        changed = (
            f"{field_.name}={getattr(self, field_.name)!r}"
            for field_ in fields(self)  # type: ignore[arg-type]
            if field_.repr and getattr(self, field_.name) != field_.default
        )
        return f"{type(self).__name__}({', '.join(changed)})"


def whole_number(value: object) -> int | None:
    """An integer of any library as an int; None for anything else."""
    # True is an index to Python and to some versions of numpy, but `top_k=True` is a mistake.
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    if getattr(value, "shape", ()):  # torch takes a tensor with one element for an index
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _checked_int(name: str, value: object, low: int, high: int, hint: str = "") -> int:
    number = whole_number(value)
    if number is None:
        raise UsageError(f"{name}={shown(value)} is not a whole number{hint}")
    if not low <= number <= high:
        raise UsageError(f"{name}={shown(number)} is out of range; use {low} to {high}{hint}")
    return number


def _checked_float(name: str, value: object, low: float, high: float, hint: str = "") -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise UsageError(f"{name}={shown(value)} is not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not low <= number <= high:
        allowed = f"{low:g} to {high:g}" if math.isfinite(high) else f"a finite number from {low:g}"
        raise UsageError(f"{name}={shown(value)} is out of range; use {allowed}{hint}")
    return number


def _checked_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{name}={shown(value)} is neither true nor false")
    return value


def _checked_grammar(name: str, value: object) -> Grammar:
    if not isinstance(value, Grammar):
        raise UsageError(f"{name}={shown(value)} must be a Grammar; give its kind and text")
    return value


def _checked_text(name: str, value: object, max_bytes: int) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{name}={shown(value)} must be a string")
    try:
        n_bytes = len(value.encode())
    except UnicodeEncodeError as error:
        raise UsageError(f"{name} has an unpaired surrogate; give valid Unicode text") from error
    if n_bytes > max_bytes:
        raise UsageError(f"{name} has {n_bytes} bytes; use at most {max_bytes}")
    return value


def items_of(value: object) -> list[Any] | None:
    """The items of a list, tuple, set or array; None for anything else, such as a string."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    to_list = getattr(value, "tolist", None)  # an array of numpy, or a tensor
    items = to_list() if callable(to_list) else None
    return items if isinstance(items, list) else None


def _checked_texts(name: str, value: object, max_items: int, max_chars: int) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else items_of(value)
    if items is None or not all(isinstance(each, str) for each in items):
        raise UsageError(f"{name}={shown(value)} is not a list of strings; write it as ['...']")
    if "" in items:
        raise UsageError(f"{name} holds an empty string, which matches everywhere; leave it out")
    n_chars = sum(map(len, items))
    if len(items) > max_items or n_chars > max_chars:
        raise UsageError(
            f"{name} holds {len(items)} strings with {n_chars} characters in all; use at most "
            f"{max_items} strings and {max_chars} characters"
        )
    return tuple(items)


def _checked_ids(name: str, value: object, max_items: int) -> frozenset[int]:
    items = items_of(value)
    if items is None:
        raise UsageError(f"{name}={shown(value)} is not a list of token ids")
    if len(items) > max_items:
        raise UsageError(f"{name} holds {len(items)} ids; use at most {max_items}")
    return frozenset(_checked_int(name, token, 0, MAX_TOKEN_ID) for token in items)


def _checked_biases(name: str, value: object) -> tuple[tuple[int, float], ...]:
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, tuple) and all(isinstance(p, tuple) and len(p) == 2 for p in value):
        pairs = list(value)
    else:
        raise UsageError(f"{name}={shown(value)} does not map token ids to biases")
    if len(pairs) > MAX_BIASES:
        raise UsageError(f"{name} holds {len(pairs)} tokens; use at most {MAX_BIASES}")
    biases = {
        _checked_int(f"{name} token id", token, 0, MAX_TOKEN_ID): _checked_float(
            f"{name} of token {token}", bias, -MAX_BIAS, MAX_BIAS
        )
        for token, bias in pairs
    }
    if len(biases) < len(pairs):
        raise UsageError(f"{name} holds a token id more than once; add up its biases")
    return tuple(sorted(biases.items()))


_PENALTY = (_checked_float, -MAX_PENALTY, MAX_PENALTY, "; 0 turns it off")


def _setting(default: Any, checked: Any, *limits: Any, or_none: bool = False) -> Any:
    """A field that `checked` validates against limits; a default of None allows None."""
    check = (checked, limits, or_none or default is None)
    return field(default=default, metadata={"check": check})


@dataclass(frozen=True, repr=False)
class SamplingParams(_ShortRepr):
    """How the tokens of a request are sampled and when it ends; validated when it is constructed.

    Logits are modified in this order: logit_bias; min_tokens, bad_words, allowed_token_ids and
    grammar, which forbid tokens; repetition_penalty; presence_penalty and frequency_penalty;
    temperature; top_k, top_p and min_p.

    Args:
        max_tokens: maximum tokens per completion; None for as many as fit into the context.
        temperature: divides the logits. Below MIN_TEMPERATURE sampling is greedy: it takes the
            largest logit and ignores top_k, top_p and min_p.
        top_p: keeps the smallest set of likeliest tokens whose probabilities sum to at least this.
        top_k: keeps this many likeliest tokens; 0 or -1 for all.
        min_p: keeps the tokens with at least this fraction of the likeliest token's probability.
        seed: makes sampling reproducible. None or -1 draws a new seed, unless the LLM has one.
        stop: strings that end the completion; a single string is allowed too.
        stop_token_ids: token ids that end the completion.
        ignore_eos: do not end at the model's eos tokens.
        logprobs: return log-probabilities, with this many alternatives for each token.
        prompt_logprobs: the same for the tokens of the prompt.
        n: number of completions (choices).
        min_tokens: before this many tokens no eos or stop id is drawn, and no stop string ends the
            completion.
        repetition_penalty: divides positive logits and multiplies negative logits of every token
            in the prompt and the completion.
        presence_penalty: subtracted from the logits of every token in the completion.
        frequency_penalty: subtracted once for each occurrence of a token in the completion.
        logit_bias: a mapping of token ids to values that are added to their logits.
        grammar: a grammar that the completion must match.
        cache_salt: requests with different salts do not share the prefix cache.
        bad_words: strings whose tokens are not drawn one after another. The same string can still
            be generated in other tokens.
        allowed_token_ids: only these token ids are drawn.
        include_stop_str_in_output: keep the stop string in the text.
        skip_special_tokens: leave special tokens out of the text.

    Lists may also be tuples, sets or arrays. None for a list or for logit_bias means an empty one.

    Raises: UsageError for a value of the wrong type or out of range.
    """

    max_tokens: int | None = _setting(128, _checked_int, 1, MAX_TOKEN_ID, or_none=True)
    temperature: float = _setting(0.0, _checked_float, 0.0, math.inf)
    top_p: float = _setting(1.0, _checked_float, 0.0, 1.0)
    top_k: int = _setting(0, _checked_int, -1, MAX_TOKEN_ID, "; 0 turns it off")
    min_p: float = _setting(0.0, _checked_float, 0.0, 1.0)
    seed: int | None = _setting(None, _checked_int, -(2**63), 2**63 - 1)
    stop: tuple[str, ...] = _setting((), _checked_texts, MAX_STOP_STRINGS, MAX_STOP_CHARS)
    stop_token_ids: frozenset[int] = _setting(frozenset(), _checked_ids, MAX_STOP_IDS)
    ignore_eos: bool = _setting(False, _checked_bool)
    logprobs: int | None = _setting(None, _checked_int, 0, MAX_LOGPROBS)
    prompt_logprobs: int | None = _setting(None, _checked_int, 0, MAX_LOGPROBS)
    n: int = _setting(1, _checked_int, 1, MAX_CHOICES)
    min_tokens: int = _setting(0, _checked_int, 0, MAX_TOKEN_ID)
    repetition_penalty: float = _setting(
        *(1.0, _checked_float, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY, "; 1 turns it off")
    )
    presence_penalty: float = _setting(0.0, *_PENALTY)
    frequency_penalty: float = _setting(0.0, *_PENALTY)
    logit_bias: tuple[tuple[int, float], ...] = _setting((), _checked_biases)  # (id, bias), by id
    grammar: Grammar | None = _setting(None, _checked_grammar)  # noqa: RUF009, a field
    cache_salt: str | None = _setting(None, _checked_text, MAX_SALT_BYTES)
    bad_words: tuple[str, ...] = _setting((), _checked_texts, MAX_BAD_WORDS, MAX_BAD_CHARS)
    allowed_token_ids: frozenset[int] | None = _setting(None, _checked_ids, MAX_ALLOWED_IDS)
    include_stop_str_in_output: bool = _setting(False, _checked_bool)
    skip_special_tokens: bool = _setting(True, _checked_bool)

    def __post_init__(self) -> None:
        for setting in fields(self):
            checked, limits, or_none = setting.metadata["check"]
            value = getattr(self, setting.name)
            if value is None and setting.default in ((), frozenset()):  # vLLM's default
                object.__setattr__(self, setting.name, setting.default)
            elif value is not None or not or_none:
                # The fields are frozen; the value is stored in its declared type.
                object.__setattr__(self, setting.name, checked(setting.name, value, *limits))
        object.__setattr__(self, "top_k", max(0, self.top_k))
        if self.seed == -1:  # as in vLLM and llama.cpp
            object.__setattr__(self, "seed", None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UsageError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; "
                "lower it or raise max_tokens"
            )
        if self.top_p == 0:
            raise UsageError("top_p=0 keeps no token; use temperature 0 for greedy decoding")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise UsageError("allowed_token_ids is empty; leave it out, or give token ids")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE

    @property
    def is_filtered(self) -> bool:
        """Whether top_k, top_p or min_p can exclude a token."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty modifies the logits."""
        return self.repetition_penalty != 1 or any((self.presence_penalty, self.frequency_penalty))


@dataclass(frozen=True)
class Request:
    """A tokenised prompt and its resolved parameters, equal on all ranks.

    Args:
        bad_ids: the token ids of each tokenisation of the bad words.
        adapter: the name of a LoRA adapter; None for the model without an adapter.
        is_interactive: whether a client waits for the first token. A short request then runs before
            long prompts, which lowers the throughput.
        fills_cache: whether max_tokens is as many as fit into the context and the KV cache. If the
            KV cache becomes smaller, max_tokens is then lowered.
        hides_markers: whether special tokens are in the text only for the reader of the answer, so
            that the client does not see them. Stop strings then match only between special tokens.
    """

    index: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    bad_ids: tuple[tuple[int, ...], ...] = ()
    adapter: str | None = None
    is_interactive: bool = False
    fills_cache: bool = False
    hides_markers: bool = False

    def __post_init__(self) -> None:
        if self.index < 0:
            raise UsageError(f"request index {self.index} is negative; count from 0")
        if self.params.max_tokens is None:
            raise UsageError(f"request {self.index}: max_tokens=None; give a number")
        if not self.prompt:
            raise UsageError(f"request {self.index}: {_EMPTY_PROMPT}")
        for token in (min(self.prompt), max(self.prompt)):
            if not 0 <= token <= MAX_TOKEN_ID:
                raise UsageError(
                    f"request {self.index}: prompt token id {token} is not in 0..{MAX_TOKEN_ID}"
                )

    @property
    def max_tokens(self) -> int:
        assert self.params.max_tokens is not None
        return self.params.max_tokens

    def shortened(self, max_seq_len: int, n_drawn: int) -> "Request":
        """The request; if it fills the KV cache, with max_tokens lowered to what fits now.

        Args:
            max_seq_len: maximum tokens of prompt and completion together.
            n_drawn: the number of tokens drawn so far; max_tokens stays above it.
        """
        max_tokens = max(max_seq_len - len(self.prompt), n_drawn + 1, self.params.min_tokens)
        if not self.fills_cache or max_tokens >= self.max_tokens:
            return self
        return replace(self, params=replace(self.params, max_tokens=max_tokens))

    def banned_ids(self, n_drawn: int) -> frozenset[int]:
        """The ids that cannot follow a completion of `n_drawn` tokens."""
        return self.stop_ids if n_drawn < self.params.min_tokens else frozenset()

    def ends_of_bad_words(self, drawn: Sequence[int]) -> frozenset[int]:
        """The ids that would complete a bad word after the drawn tokens."""
        n = len(drawn)
        return frozenset(
            ids[-1] for ids in self.bad_ids if tuple(drawn[n + 1 - len(ids) : n]) == ids[:-1]
        )


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of a chosen token, and its likeliest alternatives.

    Natural logarithms of the model's distribution: log_softmax of the logits before biases,
    penalties, masks, temperature and filters.

    Args:
        top: (token, logprob) pairs, likeliest first, without the chosen token and without tokens of
            probability 0.
        text: the text of the token; None for a model without a tokenizer.
        top_texts: the texts of the tokens of `top`.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    text: str | None = None
    top_texts: tuple[str, ...] = ()


@dataclass(frozen=True)
class CompletionOutput:
    """One choice of a request, in fields with vLLM's names; `index` is the choice's number."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...] | None = field(default=None, repr=False)
    stop_reason: str | int | None = None
    reasoning: str | None = None


@dataclass(frozen=True, repr=False)
class Completion(_ShortRepr):
    """One choice of a request.

    Args:
        text: ends before an eos, stop id or stop string, unless include_stop_str_in_output is set.
        tokens: every drawn id, including an eos, a stop id or the token that completed a stop
            string; so `tokens` may decode to more than `text`.
        choice: the number of the choice, from 0 to n_choices - 1.
        prompt_logprobs: one entry per prompt token; None for the first.
        seed: a request with this seed produces the same tokens; None for greedy decoding.
        n_cached_tokens: prompt tokens that were in the prefix cache when the request started.
        prompt, prompt_token_ids, outputs: fields of vLLM's RequestOutput, which `LLM.generate`,
            `LLM.chat` and `AsyncLLM.generate` add: the text of the prompt (None for token ids), its
            ids, and all choices.
        stop_reason: the request's stop string or stop token id that ended the choice, if any.
        reasoning: the model's reasoning, if the prompt is a conversation and the model marks it.
    """

    index: int
    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    n_prompt_tokens: int
    logprobs: tuple[TokenLogprob, ...] | None = None
    choice: int = 0
    n_choices: int = 1
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    seed: int | None = None
    n_cached_tokens: int = field(default=0, compare=False)
    prompt: str | None = field(default=None, compare=False)
    prompt_token_ids: tuple[int, ...] = field(default=(), compare=False, repr=False)
    outputs: tuple[CompletionOutput, ...] = field(default=(), compare=False, repr=False)
    stop_reason: str | int | None = None
    reasoning: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The line of `generate --json`.

        `choice` is present only with several choices, log-probabilities only on request.
        """
        line: dict[str, Any] = {
            "index": self.index,
            "text": self.text,
            "tokens": list(self.tokens),
            "finish_reason": self.finish_reason,
            "n_prompt_tokens": self.n_prompt_tokens,
        }
        if self.reasoning is not None:
            line["reasoning"] = self.reasoning
        if self.n_choices > 1:
            line["choice"] = self.choice
        if self.seed is not None:
            line["seed"] = self.seed
        if self.logprobs is not None:
            line["logprobs"] = [_logprob_json(scored) for scored in self.logprobs]
        if self.prompt_logprobs is not None:
            line["prompt_logprobs"] = [
                scored and _logprob_json(scored) for scored in self.prompt_logprobs
            ]
        return line


def with_outputs(
    choices: Sequence[Completion], prompt: str | None, request: Request
) -> list[Completion]:
    """The completions of one request, each with the request's prompt and all choices."""
    outputs = tuple(
        CompletionOutput(
            completion.choice,
            completion.text,
            completion.tokens,
            completion.finish_reason,
            completion.logprobs,
            completion.stop_reason,
            completion.reasoning,
        )
        for completion in choices
    )
    return [
        replace(completion, prompt=prompt, prompt_token_ids=request.prompt, outputs=outputs)
        for completion in choices
    ]


def with_special_tokens(request: Request) -> Request:
    """The request, with special tokens in the text of its completions, for an AnswerReader.

    The reader hides these tokens from a client that did not ask for special tokens.
    """
    params = request.params
    return replace(
        request,
        params=replace(params, skip_special_tokens=False),
        hides_markers=params.skip_special_tokens,
    )


def resolve_max_tokens(
    n_prompt: int, params: SamplingParams, max_seq_len: int, limited_by: str = "context"
) -> int:
    """Maximum tokens of the completion: as requested, or all that fit.

    Args:
        max_seq_len: maximum tokens of prompt and completion together.
        limited_by: what has this limit, for the error message.

    Raises: ContextExceeded if prompt and completion together do not fit; UsageError for an empty
    prompt.
    """
    if n_prompt == 0:
        raise UsageError(_EMPTY_PROMPT)
    n_free = max_seq_len - n_prompt
    max_tokens = (
        max(n_free, params.min_tokens, 1) if params.max_tokens is None else params.max_tokens
    )
    if max_tokens <= n_free:
        return max_tokens
    min_tokens = max(1, params.min_tokens)
    if params.min_tokens >= max_seq_len:  # then no prompt is short enough
        remedy = f"lower min_tokens={min_tokens}"
    elif n_free >= min_tokens:
        remedy = f"ask for at most {counted(n_free, 'new token')}"
    else:
        remedy = f"shorten the prompt to at most {counted(max_seq_len - min_tokens, 'token')}"
    raise ContextExceeded(
        f"{counted(n_prompt, 'prompt token')} and {counted(max_tokens, 'new token')} need "
        f"{n_prompt + max_tokens} positions, but the {limited_by} has {max_seq_len}; {remedy}, or "
        f"enlarge the {limited_by}"
    )


def new_seed() -> int:
    """A random seed, short enough to be typed."""
    return secrets.randbits(32)


def resolve_seed(params: SamplingParams, run_seed: int, index: int) -> int:
    """The request's own seed, else one derived from the seed of the run and the request's index.

    Returns: an integer in [-2**63, 2**63).
    """
    if params.seed is not None:
        return params.seed
    digest = hashlib.blake2b(f"seed {run_seed} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def resolve_stop_ids(params: SamplingParams, eos_ids: Iterable[int]) -> frozenset[int]:
    """The ids that end a request: the model's eos ids unless ignored, and the request's own."""
    return params.stop_token_ids | (frozenset() if params.ignore_eos else frozenset(eos_ids))


_EMPTY_PROMPT = "the prompt is empty; give at least one token"


def _logprob_json(scored: TokenLogprob) -> dict[str, Any]:
    line = {
        "token": scored.token,
        "logprob": scored.logprob,
        "top": [list(pair) for pair in scored.top],
    }
    if scored.text is not None:
        line |= {"text": scored.text, "top_texts": list(scored.top_texts)}
    return line
