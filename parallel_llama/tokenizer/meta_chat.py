"""Meta's chat formats, for folders without a template.

Prompts are built from tokens, so that no text of a message becomes a special token.
"""

from collections.abc import Mapping, Sequence

from parallel_llama.errors import UsageError
from parallel_llama.tokenizer.chat import Chat, Message, require_plain, require_roles, text_of
from parallel_llama.tokenizer.spm import SentencePieceTokenizer
from parallel_llama.tokenizer.tiktoken_ranks import TiktokenTokenizer


class Llama3Chat:
    """Llama 3's format: a header of special tokens before each message, <|eot_id|> after it.

    Source: llama3/chat_format.py in Meta's llama-models.
    """

    ROLES: Mapping[str, str] = {
        "system": "system", "user": "user", "assistant": "assistant", "tool": "ipython",
        "ipython": "ipython",
    }  # fmt: skip
    template_text = ""

    def __init__(self, tokenizer: TiktokenTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = tokenizer.vocabulary.special_ids
        self.stop_ids = tokenizer.eos_ids

    def encode(self, chat: Chat) -> list[int]:
        require_plain(chat)
        require_roles(chat.messages, self.ROLES)
        ids = [self._ids["<|begin_of_text|>"]]
        for message in chat.messages:
            header = self._header(self.ROLES[message["role"]])
            ids += [*header, *self._text(text_of(message)), self._ids["<|eot_id|>"]]
        return ids + self._header("assistant")

    def _header(self, role: str) -> list[int]:
        start, end = self._ids["<|start_header_id|>"], self._ids["<|end_header_id|>"]
        return [start, *self._text(role), end, *self._text("\n\n")]

    def _text(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, bos=False, special=False)


class Llama2Chat:
    """Llama 2's format: each question in [INST] tags, bos and eos around question and answer.

    The tags are ordinary text, so messages that contain one are refused, as in Meta's code.

    Source: llama/generation.py (chat_completion) in Meta's llama.
    """

    ROLES = ("system", "user", "assistant")
    TAGS = ("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>")
    template_text = ""

    def __init__(self, tokenizer: SentencePieceTokenizer, bos_id: int, eos_id: int) -> None:
        self._tokenizer = tokenizer
        self._bos_id, self._eos_id = bos_id, eos_id
        self.stop_ids = tokenizer.eos_ids

    def encode(self, chat: Chat) -> list[int]:
        require_plain(chat)
        require_roles(chat.messages, self.ROLES)
        self._refuse_tags(chat.messages)
        turns = self._turns(chat.messages)
        ids: list[int] = []
        for question, answer in zip(turns[::2], turns[1::2], strict=False):
            ids += self._text(f"[INST] {question.strip()} [/INST] {answer.strip()} ")
            ids.append(self._eos_id)
        return ids + self._text(f"[INST] {turns[-1].strip()} [/INST]")

    def _turns(self, messages: Sequence[Message]) -> list[str]:
        """The alternating contents of user and assistant; the first includes the system message."""
        system = text_of(messages[0]) if messages[0]["role"] == "system" else None
        spoken = messages if system is None else messages[1:]
        expected = [("user", "assistant")[index % 2] for index in range(len(spoken))]
        roles = [message["role"] for message in spoken]
        if roles != expected or len(roles) % 2 == 0:
            raise UsageError(
                f"roles are {', '.join(message['role'] for message in messages):.200}; Llama 2's "
                "format needs an optional system, then alternating user and assistant, a user last"
            )
        contents = [text_of(message) for message in spoken]
        if system is not None:
            contents[0] = f"<<SYS>>\n{system}\n<</SYS>>\n\n{contents[0]}"
        return contents

    def _refuse_tags(self, messages: Sequence[Message]) -> None:
        for number, message in enumerate(messages):
            for tag in self.TAGS:
                if tag in text_of(message):
                    raise UsageError(
                        f"messages[{number}] contains {tag}, which is markup of Llama 2's chat "
                        "format; remove it"
                    )

    def _text(self, text: str) -> list[int]:
        return [self._bos_id, *self._tokenizer.encode(text, bos=False, special=False)]
