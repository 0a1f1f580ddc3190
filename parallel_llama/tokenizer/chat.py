"""Chat formats: a list of messages to the tokens that ask for the next answer.

The built-in ones are Meta's, for folders that carry no template. They are put together from
tokens, so that nothing a message says can become a special token.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from parallel_llama.errors import UsageError
from parallel_llama.tokenizer.spm import SentencePieceTokenizer
from parallel_llama.tokenizer.tiktoken_ranks import TiktokenTokenizer

Message = Mapping[str, str]


class ChatTemplate(Protocol):
    """How one model wants a conversation written.

    `stop_ids` end the assistant's turn, as far as the model's files tell.
    """

    @property
    def stop_ids(self) -> frozenset[int]: ...

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of the conversation up to where the assistant's next answer begins.

        Raises: UsageError if the messages do not fit the format.
        """
        ...


def require_messages(messages: Sequence[Message]) -> None:
    """Refuse what is not a conversation: each message has a role and a content, both text."""
    if not messages:
        raise UsageError("there are no messages; give at least one, such as a user's")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise UsageError(f"message {number} is a {type(message).__name__}, not an object")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise UsageError(
                    f"message {number} has {key}={message.get(key)!r:.80}; give text as its {key}"
                )


class Llama3Chat:
    """Llama 3's format: a header of its own tokens before each message, <|eot_id|> behind it.

    Source: llama3/chat_format.py in Meta's llama-models.
    """

    ROLES: Mapping[str, str] = {
        "system": "system", "user": "user", "assistant": "assistant", "tool": "ipython",
        "ipython": "ipython",
    }  # fmt: skip

    def __init__(self, tokenizer: TiktokenTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = tokenizer.vocabulary.special_ids
        self.stop_ids = tokenizer.eos_ids

    def encode(self, messages: Sequence[Message]) -> list[int]:
        require_messages(messages)
        ids = [self._tokenizer.bos_id]
        for message in messages:
            role = self.ROLES.get(message["role"])
            if role is None:
                raise UsageError(
                    f"role {message['role']!r:.80} is not known; give " + ", ".join(self.ROLES)
                )
            ids += [*self._header(role), *self._text(message["content"]), self._ids["<|eot_id|>"]]
        return ids + self._header("assistant")

    def _header(self, role: str) -> list[int]:
        start, end = self._ids["<|start_header_id|>"], self._ids["<|end_header_id|>"]
        return [start, *self._text(role), end, *self._text("\n\n")]

    def _text(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, bos=False, special=False)


class Llama2Chat:
    """Llama 2's format: each question in [INST] tags, bos and eos around question and answer.

    Its tags are ordinary text that a message could forge, so messages that hold one are refused,
    as Meta's own code refuses them.

    Source: llama/generation.py (chat_completion) in Meta's llama.
    """

    TAGS = ("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>")

    def __init__(self, tokenizer: SentencePieceTokenizer, bos_id: int, eos_id: int) -> None:
        self._tokenizer = tokenizer
        self._bos_id, self._eos_id = bos_id, eos_id
        self.stop_ids = tokenizer.eos_ids

    def encode(self, messages: Sequence[Message]) -> list[int]:
        require_messages(messages)
        self._refuse_tags(messages)
        turns = self._turns(messages)
        ids: list[int] = []
        for question, answer in zip(turns[::2], turns[1::2], strict=False):
            ids += self._text(f"[INST] {question.strip()} [/INST] {answer.strip()} ")
            ids.append(self._eos_id)
        return ids + self._text(f"[INST] {turns[-1].strip()} [/INST]")

    def _turns(self, messages: Sequence[Message]) -> list[str]:
        """Contents from user and assistant in turn, the system's put into the first."""
        system = messages[0]["content"] if messages[0]["role"] == "system" else None
        spoken = messages if system is None else messages[1:]
        expected = [("user", "assistant")[index % 2] for index in range(len(spoken))]
        roles = [message["role"] for message in spoken]
        if roles != expected or len(roles) % 2 == 0:
            raise UsageError(
                f"roles are {', '.join(message['role'] for message in messages):.200}; Llama 2's "
                "format takes an optional system, then user and assistant in turn, a user last"
            )
        contents = [message["content"] for message in spoken]
        if system is not None:
            contents[0] = f"<<SYS>>\n{system}\n<</SYS>>\n\n{contents[0]}"
        return contents

    def _refuse_tags(self, messages: Sequence[Message]) -> None:
        for number, message in enumerate(messages):
            for tag in self.TAGS:
                if tag in message["content"]:
                    raise UsageError(
                        f"message {number} holds {tag}, which is markup of Llama 2's chat format; "
                        "take it out"
                    )

    def _text(self, text: str) -> list[int]:
        return [self._bos_id, *self._tokenizer.encode(text, bos=False, special=False)]
