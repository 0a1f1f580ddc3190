"""Turns prompts and sampling parameters into validated requests, with the model's defaults.

It needs no weights, so an invalid prompt fails immediately. Without torch.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

from parallel_llama.config.generation import GenerationDefaults
from parallel_llama.config.layouts import load_generation_defaults
from parallel_llama.errors import UsageError, shown
from parallel_llama.families.model_args import (
    MAX_SIZES,
    ModelArgs,
    context_length,
    for_context,
    with_sinks,
)
from parallel_llama.files.model_files import ModelFiles
from parallel_llama.request import (
    Completion,
    Request,
    SamplingParams,
    items_of,
    new_seed,
    resolve_max_tokens,
    resolve_seed,
    resolve_stop_ids,
    whole_number,
    with_outputs,
    with_special_tokens,
)
from parallel_llama.structured.compiler import GrammarCompiler
from parallel_llama.tokenizer import (
    Chat,
    ChatTemplate,
    Message,
    Tokenizer,
    load_chat_template,
    load_tokenizer,
)
from parallel_llama.tokenizer.answers import (
    AnswerReader,
    answer_reader,
    markers,
    split_answer,
)
from parallel_llama.tokenizer.jinja_chat import JinjaChat

Prompt = str | Sequence[int] | Sequence[Message] | Chat | Mapping[str, Any]
Prompts = Prompt | Iterable[Prompt]
Value = TypeVar("Value")

# The end of a prompt that may begin the reasoning; a marker may be one token for each character.
_N_LAST_TOKENS = 24
_ACCEPTED_FORMS = (
    "a string, a list of token ids, a conversation (a list of messages), "
    '{"prompt": ..}, {"prompt_token_ids": ..}, or a list of these'
)


def as_prompts(value: Prompts) -> list[str | list[int] | Chat]:
    """Convert a prompt or several prompts to a list of strings, token ids or chats.

    Raises: UsageError, which lists the accepted forms, for anything else.
    """
    if isinstance(value, _SINGLE_TYPES):
        return [as_prompt(value)]
    items = items_of(value)
    # An array of zero dimensions has the type of an iterable, but no items.
    if items is None and isinstance(value, Iterable) and getattr(value, "shape", None) != ():
        items = list(value)
    if items is None:
        raise UsageError(f"prompts cannot be {_shown(value)}; give {_ACCEPTED_FORMS}")
    if _is_single(items):
        return [as_prompt(items)]
    prompts = []
    for number, item in enumerate(items):
        try:
            prompts.append(as_prompt(item))
        except UsageError as error:
            raise UsageError(f"prompt {number}: {error}") from error
    return prompts


def as_prompt(value: object) -> str | list[int] | Chat:
    """Convert one prompt to a string, token ids or a chat.

    Raises: UsageError, which lists the accepted forms, for anything else.
    """
    if isinstance(value, str | Chat):
        return value
    if isinstance(value, Mapping):
        return _from_mapping(value)
    items = None if isinstance(value, bytes | set | frozenset) else items_of(value)
    if items is None:
        raise UsageError(f"a prompt cannot be {_shown(value)}; give {_ACCEPTED_FORMS}")
    if items and isinstance(items[0], Mapping):
        return Chat(items)
    return [_token(item) for item in items]


def as_token_ids(value: object) -> list[int]:
    """Convert token ids, in a list or an array of any library, to a list.

    Raises: UsageError for anything else.
    """
    prompt = None if isinstance(value, str | Mapping) else as_prompt(value)
    if not isinstance(prompt, list):
        raise UsageError(f"it is {_shown(value)}; give a list of token ids")
    return prompt


def per_prompt(
    n_prompts: int,
    params: SamplingParams | Sequence[SamplingParams] | None,
    adapter: str | Sequence[str | None] | None,
) -> list[tuple[SamplingParams | None, str | None]]:
    """The parameters and the adapter of each prompt, from one value for all or one for each.

    Raises: UsageError for another number of values, or values of other types.
    """
    own_params = _of_each(
        n_prompts, params, SamplingParams, "sampling params must be SamplingParams"
    )
    if len(own_params) != n_prompts:
        raise UsageError(
            f"{n_prompts} prompts and {len(own_params)} sampling params; give one per prompt"
        )
    adapters = _of_each(n_prompts, adapter, str, "an adapter must be a name")
    if len(adapters) != n_prompts:
        raise UsageError(
            f"{n_prompts} prompts and {len(adapters)} adapters; give one for each prompt"
        )
    return list(zip(own_params, adapters, strict=True))


def _of_each(
    n_prompts: int, value: Value | Sequence[Value | None] | None, kind: type[Value], must: str
) -> list[Value | None]:
    """The values of all prompts, from one value of type `kind` or None, or from several.

    Raises: UsageError, which says what a value `must` be, for a value of another type.
    """
    if value is None or isinstance(value, kind):
        return [value] * n_prompts
    given: Any = value
    is_several = isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping)
    values: list[Any] = list(given) if is_several else [given]
    for each in values:
        if each is not None and not isinstance(each, kind):
            raise UsageError(f"{must}, or one for each prompt in a list, not {_shown(each)}")
    return values


_SINGLE_TYPES = (str, bytes, Mapping, set, frozenset, Chat)


def _is_single(items: list[Any]) -> bool:
    """Whether a list is a single prompt: token ids, or messages."""
    if not items:
        return False
    if isinstance(items[0], Mapping):
        return "role" in items[0]
    return whole_number(items[0]) is not None


def _from_mapping(mapping: Mapping[str, Any]) -> str | list[int] | Chat:
    keys = [key for key in ("prompt", "prompt_token_ids") if key in mapping]
    if len(keys) != 1 or len(mapping) != 1:
        raise UsageError(
            f"a prompt has the keys {', '.join(map(str, mapping))[:200] or '(none)'}; give "
            '{"prompt": "..."} or {"prompt_token_ids": [..]}, and settings as SamplingParams'
        )
    value = mapping[keys[0]]
    if keys == ["prompt"] and not isinstance(value, str):
        raise UsageError(f'{{"prompt": {_shown(value)}}} must be a string')
    if keys == ["prompt_token_ids"] and items_of(value) is None:
        raise UsageError(f'{{"prompt_token_ids": {_shown(value)}}} must be a list of token ids')
    return as_prompt(value)


def _token(value: object) -> int:
    token = whole_number(value)
    if token is None:
        raise UsageError(f"token {_shown(value)} is not a whole number; give {_ACCEPTED_FORMS}")
    return token


def _shown(value: object) -> str:
    return f"{type(value).__name__} {shown(value)}"


logger = logging.getLogger(__name__)


class InputProcessor:
    """The text side of one model: its tokenizer, chat template, sampling defaults and limits.

    Args:
        max_seq_len: lowers the model's context.
        seed: for requests without a seed; by default each call draws a new seed.
        attention_sinks: the number of first tokens that stay visible, so that sequences may be
            longer than the context.

    Raises: UsageError if `max_seq_len` is beyond the model's context, or the model does not support
    attention sinks.
    """

    def __init__(
        self,
        files: ModelFiles,
        args: ModelArgs,
        *,
        max_seq_len: int | None = None,
        seed: int | None = None,
        attention_sinks: int = 0,
    ) -> None:
        self.max_seq_len = context_length(args, max_seq_len)
        args = for_context(args, self.max_seq_len)
        if attention_sinks:
            args = with_sinks(args, attention_sinks, self.max_seq_len)
        self.files, self.args, self.seed = files, args, seed
        # The longest sequence that fits into the KV cache, once it is allocated: a limit for
        # requests without max_tokens.
        self.n_cache_tokens: int | None = None

    @property
    def longest(self) -> int:
        """The maximum length of a sequence if its request sets max_tokens."""
        return MAX_SIZES["max_seq_len"] if self.args.attention_sinks else self.max_seq_len

    @property
    def max_fitting_tokens(self) -> int:
        """The maximum length of a sequence that fits into both the context and the KV cache."""
        if self.n_cache_tokens is None:
            return self.max_seq_len
        return min(self.max_seq_len, self.n_cache_tokens + 1)  # the last token is not cached

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Raises: UsageError if the model has no tokenizer, CheckpointError if it is damaged."""
        if self.files.kind == "config":
            raise UsageError(
                f"{self.files.path.stem} is a model shape without a tokenizer; give token ids, as "
                '{"tokens": [..]} lines of --prompts or in --tokens-file'
            )
        return load_tokenizer(self.files.path)

    @cached_property
    def has_tokenizer(self) -> bool:
        """Whether the model has a tokenizer; token ids work without one."""
        try:
            return self.tokenizer is not None
        except UsageError:
            return False

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The model's chat template; None if it has none."""
        return load_chat_template(self.files.path, self.tokenizer)

    @cached_property
    def has_markers(self) -> bool:
        """Whether the model's answers to chats have markers for reasoning or tool calls."""
        return self.chat_template is not None and bool(markers(self.chat_template.template_text))

    @cached_property
    def has_special_markers(self) -> bool:
        """Whether these markers are special tokens, which are removed from texts by default."""
        if self.chat_template is None:
            return False
        special_ids = self.tokenizer.vocabulary.special_ids
        return any(mark in special_ids for mark in markers(self.chat_template.template_text))

    def answer_reader(self, request: Request) -> AnswerReader | None:
        """A reader of the answer to a chat; None if the answer has no markers.

        No grammar allows markers: an answer with a grammar is text, even if the prompt begins the
        reasoning.
        """
        if self.chat_template is None or not self.has_markers or request.params.grammar is not None:
            return None
        end = self.tokenizer.decode(request.prompt[-_N_LAST_TOKENS:], skip_special=False)
        return answer_reader(self.chat_template.template_text, end)

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """The compiler of grammars to masks over this model's vocabulary."""
        return GrammarCompiler(self.tokenizer, self.args.vocab_size, self._eos_ids)

    def close(self) -> None:
        """End the processes of the tokenizer, the chat template and the grammars.

        They start again on demand.
        """
        cached = vars(self)  # cached properties that have been read
        if "tokenizer" in cached:
            self.tokenizer.close()
        if isinstance(cached.get("chat_template"), JinjaChat):
            cached["chat_template"].close()
        if "grammars" in cached:
            self.grammars.close()

    @cached_property
    def defaults(self) -> GenerationDefaults:
        return load_generation_defaults(self.files)

    def sampling_params(self, **overrides: Any) -> SamplingParams:
        """The model's default sampling parameters, overridden by `overrides`.

        Raises: UsageError for a value out of range, naming the model if the value is the model's.
        """
        try:
            return SamplingParams(**{**self.defaults.sampling, **overrides})
        except UsageError as error:
            SamplingParams(**overrides)
            raise UsageError(
                f"the model's default sampling parameters, in {self.files.path}: {error}; correct "
                "it there, or set this parameter in the request"
            ) from error

    def requests(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[Request]:
        """Requests for one prompt or several, in any accepted form.

        `params` and `adapter` are one value for all prompts, or a list with one value per prompt.

        Raises: UsageError naming the prompt that is invalid, empty, too long or not for this model.
        """
        prompt_list = as_prompts(prompts)
        params = self.sampling_params() if params is None else params
        settings = per_prompt(len(prompt_list), params, adapter)
        seed = self.run_seed()
        requests = []
        for index, (prompt, (own_params, name)) in enumerate(
            zip(prompt_list, settings, strict=True)
        ):
            try:
                requests.append(self.request(index, prompt, own_params, seed, name))
            except UsageError as error:
                raise UsageError(f"prompt {index}: {error}") from error
        return requests

    def run_seed(self) -> int:
        """The seed for requests without a seed: `seed`, or a new random seed."""
        return new_seed() if self.seed is None else self.seed

    def request(
        self,
        index: int,
        prompt: Prompt,
        params: SamplingParams | None = None,
        run_seed: int | None = None,
        adapter: str | None = None,
        *,
        is_interactive: bool = False,
    ) -> Request:
        """The request for one prompt. Without a seed, its seed follows from `run_seed` and `index`.

        The engine checks whether the adapter is loaded.

        Raises: UsageError for a prompt or parameters that this model does not support.
        """
        params = params or self.sampling_params()
        tokens = self.encode(as_prompt(prompt))
        max_tokens = self._max_tokens(len(tokens), params)
        self.check_sequence(tokens)
        if not self.has_tokenizer:
            for name in ("stop", "bad_words", "grammar"):
                if getattr(params, name):
                    raise UsageError(f"{name} needs a tokenizer and this model has none")
        if params.grammar is not None:
            self.grammars.matcher(params.grammar)  # cached, so that the engine need not compile it
            if params.logit_bias:
                logger.warning(
                    "request %d: its logit_bias cannot bring back a token that its grammar forbids",
                    index,
                )
        self.check_ids("logit_bias", (token for token, _ in params.logit_bias))
        self.check_ids("allowed_token_ids", params.allowed_token_ids or ())
        return Request(
            index,
            tokens,
            replace(params, max_tokens=max_tokens),
            resolve_seed(params, self.run_seed() if run_seed is None else run_seed, index),
            resolve_stop_ids(params, self._eos_ids),
            self._token_sequences(params.bad_words),
            adapter,
            is_interactive,
            fills_cache=params.max_tokens is None,
        )

    def _max_tokens(self, n_prompt: int, params: SamplingParams) -> int:
        """Raises: as `resolve_max_tokens`."""
        if params.max_tokens is not None:
            return resolve_max_tokens(n_prompt, params, self.longest)
        limit = self.max_fitting_tokens
        limited_by = "KV cache" if limit < self.max_seq_len else "context"
        return resolve_max_tokens(n_prompt, params, limit, limited_by)

    def chats(
        self,
        messages: Any,
        tools: Sequence[Mapping[str, Any]],
        documents: Sequence[Mapping[str, Any]],
        template_vars: Mapping[str, Any],
    ) -> list[Chat]:
        """The chats of one conversation, or of a list of conversations.

        Raises: UsageError for anything else.
        """
        items = items_of(messages)
        if not items:
            raise UsageError("give a conversation (a list of messages) or a list of conversations")
        conversations = [items] if isinstance(items[0], Mapping) else items
        return [
            Chat(conversation, tools, documents, template_vars) for conversation in conversations
        ]

    def check_ids(self, name: str, ids: Iterable[int]) -> None:
        """Raises: UsageError for an id outside the vocabulary."""
        if (largest := max(ids, default=0)) >= self.args.vocab_size:
            raise UsageError(
                f"{name}: token id {largest} is outside the vocabulary, "
                f"0 to {self.args.vocab_size - 1}"
            )

    def _token_sequences(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token ids of each word with and without a space before it.

        Encoded at the start of a text and inside one, because SentencePiece prepends a space.
        """
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word, " " + word.lstrip(" ")):
                sequences[tuple(self.tokenizer.encode(text, bos=False, special=False))] = None
                sequences[tuple(self.tokenizer.encode_continued(text))] = None
        return tuple(filter(None, sequences))

    def check_sequence(self, tokens: Sequence[int]) -> None:
        """Check token ids, but not their number.

        Raises: UsageError for an empty sequence, and for an invalid id.
        """
        if not tokens:
            raise UsageError("it is empty; give at least one token")
        for token in tokens:
            if type(token) is not int:  # bool is an int to Python
                raise UsageError(f"token {token!r} is not a whole number")
            if not 0 <= token < self.args.vocab_size:
                raise UsageError(
                    f"token id {token} is outside the vocabulary, 0 to {self.args.vocab_size - 1}"
                )

    def encode(self, prompt: str | list[int] | Chat) -> tuple[int, ...]:
        """The token ids of a prompt.

        Raises: UsageError for a chat without a chat template, or a string without a tokenizer.
        """
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode(prompt)) if prompt else ()
        if isinstance(prompt, list):
            return tuple(prompt)
        if self.chat_template is None:
            raise UsageError(
                f"{self.files.path} has no chat template, so it is not a chat model; "
                "give a string or token ids"
            )
        return tuple(self.chat_template.encode(prompt))

    def with_markers(self, prompt: str | list[int] | Chat, request: Request) -> Request:
        """The request for a prompt, with the markers that `finished` needs in its text."""
        is_shown = self._is_split(prompt, request) and self.has_special_markers
        return with_special_tokens(request) if is_shown else request

    def finished(
        self, prompt: str | list[int] | Chat, request: Request, choices: Sequence[Completion]
    ) -> list[Completion]:
        """The results of a request: reasoning and answer separated, with prompt and all choices.

        Args:
            choices: the completions of `with_markers(prompt, request)`, by choice.
        """
        if self._is_split(prompt, request):
            choices = [self._split(request, completion) for completion in choices]
        return with_outputs(choices, self._text_of(prompt, request), request)

    def _is_split(self, prompt: str | list[int] | Chat, request: Request) -> bool:
        """Whether the model marks its reasoning, and the request hides special tokens."""
        is_hidden = request.params.skip_special_tokens
        return isinstance(prompt, Chat) and self.has_markers and is_hidden

    def _split(self, request: Request, completion: Completion) -> Completion:
        """A completion with its reasoning separated from its text."""
        reader = self.answer_reader(request)
        if reader is None:
            return completion
        reasoning, text = split_answer(reader, completion.text)
        return replace(completion, text=text, reasoning=reasoning or None)

    def _text_of(self, prompt: str | list[int] | Chat, request: Request) -> str | None:
        """The text of a prompt, rendered by the template for a chat; None for token ids."""
        if isinstance(prompt, Chat):
            return self.tokenizer.decode(request.prompt, skip_special=False)
        return prompt if isinstance(prompt, str) else None

    @cached_property
    def _eos_ids(self) -> frozenset[int]:
        """The ids that end a text or a chat turn in any of the model's files."""
        ids = frozenset(self.defaults.eos_ids)
        if self.has_tokenizer:
            ids |= self.tokenizer.eos_ids
            ids |= self.chat_template.stop_ids if self.chat_template else frozenset()
        return ids
