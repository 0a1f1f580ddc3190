"""The chat format that a model brings along as a jinja template."""

from collections.abc import Mapping, Sequence

from parallel_llama.tokenizer.chat import Message, require_messages
from parallel_llama.tokenizer.template_renderer import TemplateRenderer
from parallel_llama.tokenizer.vocabulary import Tokenizer

# Tokens with which models end a turn. One counts for a model if it is a special token there and
# its template writes it, for the tokenizer's own eos is often the end of a document.
_TURN_ENDS = (
    "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|im_end|>", "<|end|>", "<|end_of_turn|>",
    "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<|END_OF_TURN_TOKEN|>",
)  # fmt: skip


class JinjaChat:
    """Renders the model's template and encodes the text, special tokens included.

    A message that spells a special token thereby becomes one: the template gives text alone, and
    every library that follows HF's convention reads it so.
    `names` are the special tokens by the names that templates use, such as `bos_token`.
    """

    def __init__(
        self,
        template: str,
        tokenizer: Tokenizer,
        names: Mapping[str, str],
        source: str,
        renderer: TemplateRenderer | None = None,
    ) -> None:
        self._template, self._names, self._source = template, dict(names), source
        self._tokenizer = tokenizer
        self._renderer = renderer or TemplateRenderer()
        special_ids = tokenizer.vocabulary.special_ids
        self.stop_ids = tokenizer.eos_ids | {
            special_ids[text] for text in _TURN_ENDS if text in special_ids and text in template
        }

    def encode(self, messages: Sequence[Message]) -> list[int]:
        text = self.render(messages)
        return self._tokenizer.encode(text, bos=not self._begins_with_bos(text))

    def render(self, messages: Sequence[Message]) -> str:
        """The text of the conversation, up to where the assistant's next answer begins."""
        require_messages(messages)
        context = {
            **self._names,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": True,
            "tools": None,
            "documents": None,
        }
        return self._renderer.render(self._template, context, self._source)

    def _begins_with_bos(self, text: str) -> bool:
        bos_id = self._tokenizer.bos_id
        if bos_id is None:
            return False
        spelled = self._tokenizer.decode([bos_id], skip_special=False)
        return text.startswith(spelled)
