"""The model `parallel_llama` of lm-evaluation-harness, which only this module imports.

Run as a program, it starts the harness, for versions that do not load entry points.

Source: the model guide of lm-evaluation-harness 0.4.13.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import lm_eval.models  # noqa: F401, before other modules, or it does not register its models
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from parallel_llama.errors import UsageError, shown
from parallel_llama.llm import LLM
from parallel_llama.request import Completion, SamplingParams
from parallel_llama.tokenizer import Chat, ChatTemplate
from parallel_llama.tokenizer.jinja_chat import JinjaChat

MAX_GEN_TOKS = 256
_MAX_TOKENS = "max_gen_toks", "max_new_tokens", "max_completion_tokens", "max_tokens"

Scored = tuple[tuple[str, str] | None, list[int], list[int]]  # texts, context, continuation


@register_model("parallel_llama")
class ParallelLlama(TemplateLM):  # type: ignore[misc]
    """A model on some ranks of this host; further arguments are those of `LLM`.

    With a batch size of 1, log-likelihoods are bitwise those of `LLM.score`. Larger batches share
    steps, which can change the last digits where batch invariance is not exact (see
    docs/design.md).

    Raises: UsageError as `LLM`.
    """

    def __init__(
        self,
        model: str = "smollm2",
        tp_size: int = 1,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str = "auto",
        **options: Any,
    ) -> None:
        super().__init__()
        # The harness's default is cuda:0, even on a machine without a GPU.
        device = "auto" if device == "cuda:0" else device
        self.llm = LLM(model, tp_size=tp_size, device=device, **options)
        self.max_length = self.llm.input_processor.max_seq_len
        is_auto = str(batch_size).startswith("auto")  # "auto" or "auto:N"
        self._n_at_once = int(max_batch_size or 64 if is_auto else batch_size)

    @property
    def eot_token_id(self) -> int:
        """Raises: UsageError for a tokenizer without an eos token."""
        eos_ids = self.llm.get_tokenizer().eos_ids
        if not eos_ids:
            raise UsageError("the model's tokenizer has no eos token; use a model that has one")
        return min(eos_ids)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context."""
        bos_id = self.llm.get_tokenizer().bos_id
        return self.eot_token_id if bos_id is None else bos_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Token ids of a text.

        By default they start with bos if the model's own tokenizer adds it, but not twice: the text
        of a chat template has it already.
        """
        tokenizer = self.llm.get_tokenizer()
        if add_special_tokens is None:
            add_special_tokens = not tokenizer.begins_with_prefix(string)
        return tokenizer.encode(string, bos=add_special_tokens)

    @property
    def tokenizer_name(self) -> str:
        """The part of the harness's cache keys that stands for the tokenizer and its template."""
        return str(self.llm.input_processor.files.path).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The source of the template, for the harness's results; "" for a built-in format.

        Raises: UsageError for a model without a template, and for the name of another template.
        """
        if isinstance(chat_template, str) and chat_template != "default":
            raise UsageError(
                f"--apply_chat_template {chat_template!r}: only the model's default chat template "
                "is supported; give the option without a name"
            )
        return self._chat_template().template_text

    def apply_chat_template(
        self, chat_history: Sequence[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation, up to the beginning of the assistant's next answer.

        Args:
            add_generation_prompt: if false, the last message begins the next answer. As in the
                harness's other models, system messages are dropped if the template has none.

        Raises: UsageError for a model without a template, or messages that it refuses.
        """
        template = self._chat_template()
        if not template.takes_system:
            chat_history = [each for each in chat_history if each["role"] != "system"]
        chat = Chat(chat_history, continues=not add_generation_prompt)
        if isinstance(template, JinjaChat):
            return template.render(chat)
        return self.llm.get_tokenizer().decode(template.encode(chat), skip_special=False)

    def _chat_template(self) -> ChatTemplate:
        template = self.llm.input_processor.chat_template
        if template is None:
            raise UsageError(
                f"{self.llm.input_processor.files.path} has no chat template, so it is not a chat "
                "model; run without --apply_chat_template"
            )
        return template

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """Log-likelihoods of whole texts, in windows of the context's length."""
        return [self._rolling(request.args[0]) for request in requests]

    def _rolling(self, text: str) -> float:
        windows = get_rolling_token_windows(
            # The prefix token is bos, which is not scored.
            token_list=self.tok_encode(text, add_special_tokens=False),
            prefix_token=self.prefix_token_id,
            # Less one token of context and one token that is drawn.
            max_seq_len=self.max_length - 2,
            context_len=1,
        )
        scored = [(None, *make_disjoint_window(window)) for window in windows]
        total = sum(value for value, _ in self._loglikelihood_tokens(scored))
        self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return total

    def _loglikelihood_tokens(
        self, requests: Sequence[Scored], **_: Any
    ) -> list[tuple[float, bool]]:
        """Raises: UsageError for a continuation without tokens, before anything runs."""
        for texts, _context, continuation in requests:
            if not continuation:
                raise UsageError(
                    f"continuation {shown(texts and texts[1])} adds no token to its context: it is "
                    "empty, or the tokenizer merges it with the end of the context; change the "
                    "task's target_delimiter or choices"
                )
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
        # Leaves room for the one token that is drawn.
        prompts = [
            (context + continuation)[1 - self.max_length :]
            for _texts, context, continuation in requests
        ]
        results = []
        completions = self._completions(prompts, [params] * len(prompts))
        for (texts, _context, continuation), completion in zip(requests, completions, strict=True):
            assert completion.prompt_logprobs is not None
            scored = [
                token
                for token in completion.prompt_logprobs[-len(continuation) :]
                if token is not None
            ]
            is_greedy = all(not token.top or token.logprob >= token.top[0][1] for token in scored)
            results.append((sum(token.logprob for token in scored), is_greedy))
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, results[-1])
        return results

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        """Each request's completion, up to its stop strings.

        Raises: UsageError for unknown settings, and for completions as long as the context.
        """
        prompts, params = [], []
        for context, settings in (request.args for request in requests):
            params.append(_sampling(dict(settings)))
            n_prompt_tokens = self.max_length - (params[-1].max_tokens or 0)
            if n_prompt_tokens < 1:
                raise UsageError(
                    f"max_gen_toks={params[-1].max_tokens}: the context has {self.max_length} "
                    f"tokens; use at most {self.max_length - 1}, or enlarge the context"
                )
            prompts.append(self.tok_encode(context)[-n_prompt_tokens:])
        texts = []
        completions = self._completions(prompts, params)
        for request, completion in zip(requests, completions, strict=True):
            texts.append(completion.text)
            self.cache_hook.add_partial("generate_until", request.args, completion.text)
        return texts

    def _completions(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]
    ) -> Iterator[Completion]:
        for start in range(0, len(prompts), self._n_at_once):
            batch = slice(start, start + self._n_at_once)
            yield from self.llm.generate(prompts[batch], params[batch])


def _sampling(settings: dict[str, Any]) -> SamplingParams:
    """The harness's settings as SamplingParams; greedy without `do_sample` and `temperature`.

    Raises: UsageError for an unknown setting.
    """
    until: Any = settings.pop("until", None) or []
    limits = [settings.pop(name) for name in _MAX_TOKENS if name in settings]
    max_tokens = limits[0] if limits else MAX_GEN_TOKS
    do_sample = settings.pop("do_sample", None)
    if do_sample:
        settings.setdefault("temperature", 1.0)
    elif do_sample is not None:
        settings["temperature"] = 0.0
    try:
        return SamplingParams(**{"stop": until, "max_tokens": max_tokens, **settings})
    except TypeError as error:
        raise UsageError(f"generation settings: {error}") from error


if __name__ == "__main__":
    cli_evaluate()
