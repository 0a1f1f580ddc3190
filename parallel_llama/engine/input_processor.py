"""Builds requests from all forms of prompts and from parameters: adds defaults, validates.

It needs no weights, so a prompt that is too long fails at once. Imports no torch.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

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
    Request,
    SamplingParams,
    items_of,
    new_seed,
    resolve_max_tokens,
    resolve_seed,
    resolve_stop_ids,
    whole_number,
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
from parallel_llama.tokenizer.answers import AnswerReader, answer_reader, has_marks
from parallel_llama.tokenizer.jinja_chat import JinjaChat

Prompt = str | Sequence[int] | Sequence[Message] | Chat | Mapping[str, Any]
Prompts = Prompt | Iterable[Prompt]

_TAKEN = (
    "a string, a list of token ids, a conversation (a list of messages), "
    '{"prompt": ..}, {"prompt_token_ids": ..}, or a list of these'
)


def as_prompts(given: Prompts) -> list[str | list[int] | Chat]:
    """Convert a prompt or several prompts to a list of strings, token ids or chats.

    Raises: UsageError, which lists the accepted forms, for anything else.
    """
    if isinstance(given, _SINGLE):
        return [as_prompt(given)]
    items = items_of(given)
    if items is None and isinstance(given, Iterable):
        items = list(given)
    if items is None:
        raise UsageError(f"prompts cannot be {_shown(given)}; give {_TAKEN}")
    if _is_single(items):
        return [as_prompt(items)]
    prompts = []
    for number, item in enumerate(items):
        try:
            prompts.append(as_prompt(item))
        except UsageError as error:
            raise UsageError(f"prompt {number}: {error}") from error
    return prompts


def as_prompt(given: object) -> str | list[int] | Chat:
    """Convert one prompt to a string, token ids or a chat.

    Raises: UsageError, which lists the accepted forms, for anything else.
    """
    if isinstance(given, str | Chat):
        return given
    if isinstance(given, Mapping):
        return _from_mapping(given)
    items = None if isinstance(given, bytes | set | frozenset) else items_of(given)
    if items is None:
        raise UsageError(f"a prompt cannot be {_shown(given)}; give {_TAKEN}")
    if items and isinstance(items[0], Mapping):
        return Chat(items)
    return [_token(item) for item in items]


_SINGLE = (str, bytes, Mapping, set, frozenset, Chat)


def _is_single(items: list[Any]) -> bool:
    """Whether a list is a single prompt: token ids, or messages."""
    if not items:
        return False
    if isinstance(items[0], Mapping):
        return "role" in items[0]
    return whole_number(items[0]) is not None


def _from_mapping(given: Mapping[str, Any]) -> str | list[int] | Chat:
    keys = [key for key in ("prompt", "prompt_token_ids") if key in given]
    if len(keys) != 1 or len(given) != 1:
        raise UsageError(
            f"a prompt has the keys {', '.join(map(str, given))[:200] or '(none)'}; give "
            '{"prompt": "..."} or {"prompt_token_ids": [..]}, and settings as SamplingParams'
        )
    value = given[keys[0]]
    if keys == ["prompt"] and not isinstance(value, str):
        raise UsageError(f'{{"prompt": {_shown(value)}}} must be a string')
    if keys == ["prompt_token_ids"] and items_of(value) is None:
        raise UsageError(f'{{"prompt_token_ids": {_shown(value)}}} must be a list of token ids')
    return as_prompt(value)


def _token(value: object) -> int:
    token = whole_number(value)
    if token is None:
        raise UsageError(f"token {_shown(value)} is not a whole number; give {_TAKEN}")
    return token


def _shown(value: object) -> str:
    return f"{type(value).__name__} {shown(value)}"


logger = logging.getLogger(__name__)


class InputProcessor:
    """The text side of one model: its tokenizer, chat template, sampling defaults and limits.

    `max_seq_len` lowers the model's context. `seed` is used for requests without a seed; if it is
    None, each call draws a new seed. With `attention_sinks`, that many first tokens stay visible,
    and sequences may be longer than the context.

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
        """Maximum length of a sequence if its request sets max_tokens."""
        return MAX_SIZES["max_seq_len"] if self.args.attention_sinks else self.max_seq_len

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
    def has_marks(self) -> bool:
        """Whether the model marks reasoning and tool calls in its answers to chats."""
        return self.chat_template is not None and has_marks(self.chat_template.template_text)

    def answer_reader(self, prompt: Sequence[int]) -> AnswerReader | None:
        """A reader of the answer to a chat; None if the model's answers have no marks."""
        if self.chat_template is None or not self.has_marks:
            return None
        last = self.tokenizer.decode(prompt[-1:], skip_special=False)
        return answer_reader(self.chat_template.template_text, last)

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """The compiler of grammars to masks over this model's vocabulary."""
        return GrammarCompiler(self.tokenizer, self.args.vocab_size, self._eos_ids)

    def close(self) -> None:
        """End the processes of the tokenizer, the chat template and the grammars.

        They start again on demand.
        """
        used = vars(self)  # properties that have been read
        if "tokenizer" in used:
            self.tokenizer.close()
        if isinstance(used.get("chat_template"), JinjaChat):
            used["chat_template"].close()
        if "grammars" in used:
            self.grammars.close()

    @cached_property
    def defaults(self) -> GenerationDefaults:
        return load_generation_defaults(self.files)

    def sampling_params(self, **given: Any) -> SamplingParams:
        """The model's default sampling parameters, overridden by the given ones.

        Raises: UsageError for a value out of range, naming the model if the value is the model's.
        """
        try:
            return SamplingParams(**{**self.defaults.sampling, **given})
        except UsageError as error:
            SamplingParams(**given)
            raise UsageError(
                f"the model's own settings, in {self.files.path}: {error}; or give a value instead"
            ) from error

    def requests(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[Request]:
        """Requests for one prompt or several, in any accepted form.

        `params` and `adapter` are for all prompts, or a list with one for each.

        Raises: UsageError naming the prompt that is invalid, empty, too long or not for this model.
        """
        given = as_prompts(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or self.sampling_params()] * len(given)
        if len(params) != len(given):
            raise UsageError(
                f"{len(given)} prompts and {len(params)} sampling params; give one for each prompt"
            )
        adapters = [adapter] * len(given) if isinstance(adapter, str | None) else [*adapter]
        if len(adapters) != len(given):
            raise UsageError(
                f"{len(given)} prompts and {len(adapters)} adapters; give one for each prompt"
            )
        seed = self.run_seed()
        requests = []
        for index, (prompt, own, name) in enumerate(zip(given, params, adapters, strict=True)):
            try:
                requests.append(self.request(index, prompt, own, seed, name))
            except UsageError as error:
                raise UsageError(f"prompt {index}: {error}") from error
        return requests

    def run_seed(self) -> int:
        """The seed for requests without one: the given seed, else a new one."""
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
        """The request for one prompt; without a seed, it gets one from `run_seed` and `index`.

        Whether the adapter is loaded is checked by the engine.

        Raises: UsageError for a prompt or parameters that this model does not support.
        """
        params = params or self.sampling_params()
        tokens = self.encode(as_prompt(prompt))
        limit = self.max_seq_len if params.max_tokens is None else self.longest
        if params.max_tokens is None and self.n_cache_tokens is not None:
            limit = min(limit, self.n_cache_tokens)
        most = resolve_max_tokens(len(tokens), params, limit)
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
            replace(params, max_tokens=most),
            resolve_seed(params, self.run_seed() if run_seed is None else run_seed, index),
            resolve_stop_ids(params, self._eos_ids),
            self._spellings(params.bad_words),
            adapter,
            is_interactive,
        )

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
            raise UsageError("give a conversation, a list of messages, or a list of conversations")
        conversations = [items] if isinstance(items[0], Mapping) else items
        return [Chat(each, tools, documents, template_vars) for each in conversations]

    def check_ids(self, name: str, ids: Iterable[int]) -> None:
        """Raises: UsageError for an id outside the vocabulary."""
        if (largest := max(ids, default=0)) >= self.args.vocab_size:
            raise UsageError(
                f"{name}: token id {largest} is outside the vocabulary, "
                f"0 to {self.args.vocab_size - 1}"
            )

    def _spellings(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The ids of each word, at the beginning of a text and after a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for text in (word, " " + word.lstrip(" ")):
                found[tuple(self.tokenizer.encode(text, bos=False, special=False))] = None
        return tuple(filter(None, found))

    def check_sequence(self, tokens: Sequence[int]) -> None:
        """Check token ids; there is no limit on their number.

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

    def text_of(self, prompt: str | list[int] | Chat, request: Request) -> str | None:
        """A prompt as text, a chat as its template renders it; None for token ids."""
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
