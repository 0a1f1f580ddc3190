"""From what a person asks to requests: text to tokens, defaults filled in, everything checked.

The whole of it happens before any weight is read, so that a prompt that is too long is refused at
once. It imports no torch and does not know how requests run.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from parallel_llama.config import (
    GenerationDefaults,
    ModelArgs,
    context_length,
    load_generation_defaults,
)
from parallel_llama.errors import UsageError
from parallel_llama.model_files import ModelFiles
from parallel_llama.request import (
    Grammar,
    Request,
    SamplingParams,
    check_fits,
    resolve_seed,
    resolve_stop_ids,
)
from parallel_llama.structured import GrammarCompiler
from parallel_llama.tokenizer import (
    Chat,
    ChatTemplate,
    Tokenizer,
    load_chat_template,
    load_tokenizer,
)

Message = dict[str, Any]
Prompt = str | Sequence[int] | Sequence[Message] | Chat


class Intake:
    """The text side of one model: its tokenizer, chat template, sampling defaults and limits.

    `max_seq_len` lowers the model's own context; `seed` is the run's, for requests without one.

    Raises: UsageError if `max_seq_len` is beyond the model's context.
    """

    def __init__(
        self, files: ModelFiles, args: ModelArgs, *, max_seq_len: int | None = None, seed: int = 0
    ) -> None:
        self.files, self.args, self.seed = files, args, seed
        self.max_seq_len = context_length(args, max_seq_len)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Raises: UsageError if the model has no tokenizer, CheckpointError if it is damaged."""
        if self.files.kind == "config":
            raise UsageError(
                f"{self.files.path.stem} is a shape without a tokenizer; give token ids, as "
                '{"tokens": [..]} lines of --prompts or in --tokens-file'
            )
        return load_tokenizer(self.files.path)

    @cached_property
    def has_tokenizer(self) -> bool:
        """Whether text can go in and out; token ids always can."""
        try:
            return self.tokenizer is not None
        except UsageError:
            return False

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """How a conversation becomes tokens; None where the model has none."""
        return load_chat_template(self.files.path, self.tokenizer)

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """What turns a request's grammar into masks over this model's vocabulary."""
        return GrammarCompiler(self.tokenizer, self.args.vocab_size, self._eos_ids)

    @cached_property
    def defaults(self) -> GenerationDefaults:
        return load_generation_defaults(self.files)

    def sampling_params(self, **given: Any) -> SamplingParams:
        """The sampling that the model's authors want, with whatever is given in its place.

        Raises: UsageError for a value out of range, naming the model where the value is its own.
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
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Request]:
        """Requests for texts, token ids and conversations, mixed as they come.

        Raises: UsageError naming the prompt that is empty, too long or not made for this model.
        """
        if params is None or isinstance(params, SamplingParams):
            params = [params or self.sampling_params()] * len(prompts)
        if len(params) != len(prompts):
            raise UsageError(
                f"{len(prompts)} prompts and {len(params)} sampling params; match them"
            )
        requests = []
        for index, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
            try:
                requests.append(self.request(index, prompt, own))
            except UsageError as error:
                raise UsageError(f"prompt {index}: {error}") from error
        return requests

    def request(self, index: int, prompt: Prompt, params: SamplingParams | None = None) -> Request:
        """The request for one prompt; `index` is its number, and the seed's where it has none.

        Raises: UsageError for a prompt or settings that this model cannot take.
        """
        params = params or self.sampling_params()
        tokens = self._tokens(prompt)
        check_fits(len(tokens), params, self.max_seq_len)
        self.check_sequence(tokens)
        if params.stop and not self.has_tokenizer:
            raise UsageError("stop strings need a tokenizer and this model has none")
        if params.grammar is not None:
            self._check_grammar(params.grammar)
        largest = max((token for token, _ in params.logit_bias), default=0)
        if largest >= self.args.vocab_size:
            raise UsageError(
                f"logit_bias: token id {largest} is outside the vocabulary, "
                f"0 to {self.args.vocab_size - 1}"
            )
        seed = resolve_seed(params, self.seed, index)
        return Request(index, tokens, params, seed, resolve_stop_ids(params, self._eos_ids))

    def _check_grammar(self, grammar: Grammar) -> None:
        if not self.has_tokenizer:
            raise UsageError("a grammar needs a tokenizer and this model has none")
        self.grammars.matcher(grammar)  # kept, so that the engine finds it compiled

    def check_sequence(self, tokens: Sequence[int]) -> None:
        """Check token ids that are to be scored.

        Raises: UsageError for an empty sequence, one beyond the context, or an id that is none.
        """
        if not tokens:
            raise UsageError("it is empty; give at least one token")
        if len(tokens) > self.max_seq_len:
            raise UsageError(
                f"{len(tokens)} tokens and the context is {self.max_seq_len}; "
                f"shorten it by {len(tokens) - self.max_seq_len}"
            )
        for token in tokens:
            if type(token) is not int:  # bool is an int to Python
                raise UsageError(f"token {token!r} is not a whole number")
            if not 0 <= token < self.args.vocab_size:
                raise UsageError(
                    f"token id {token} is outside the vocabulary, 0 to {self.args.vocab_size - 1}"
                )

    def _tokens(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode(prompt)) if prompt else ()
        if not isinstance(prompt, Chat):
            messages = [turn for turn in prompt if isinstance(turn, dict)]
            if not messages:
                return tuple(token for token in prompt if not isinstance(token, dict))
            if len(messages) != len(prompt):
                raise UsageError("messages and token ids are mixed; give one or the other")
            prompt = Chat(messages)
        if self.chat_template is None:
            raise UsageError(
                f"{self.files.path} has no chat template, so it is no chat model; "
                "give text without a chat"
            )
        return tuple(self.chat_template.encode(prompt))

    @cached_property
    def _eos_ids(self) -> frozenset[int]:
        """Every id that ends a text or a turn, as far as any of the model's files says."""
        ids = frozenset(self.defaults.eos_ids)
        if self.has_tokenizer:
            ids |= self.tokenizer.eos_ids
            ids |= self.chat_template.stop_ids if self.chat_template else frozenset()
        return ids
