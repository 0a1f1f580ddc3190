"""Meta's and Mistral's chat formats, for folders without a template.

Prompts are built from tokens, so that no text of a message becomes a special token.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise

from parallel_llama.errors import CheckpointError, UsageError
from parallel_llama.tokenizer.chat import (
    Chat,
    Message,
    developer_as_system,
    require_plain,
    require_roles,
    text_of,
)
from parallel_llama.tokenizer.spm import SentencePieceTokenizer
from parallel_llama.tokenizer.tiktoken_ranks import TiktokenTokenizer
from parallel_llama.tokenizer.tokenizer import Tokenizer


class Llama3Chat:
    """Llama 3's format: a header of special tokens before each message, <|eot_id|> after it.

    Source: llama3/chat_format.py in Meta's llama-models.
    """

    ROLES: Mapping[str, str] = {
        "system": "system", "user": "user", "assistant": "assistant", "tool": "ipython",
        "ipython": "ipython",
    }  # fmt: skip
    template_text = ""
    takes_system = True
    takes_tools = False

    def __init__(self, tokenizer: TiktokenTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = tokenizer.vocabulary.special_ids
        self.stop_ids = tokenizer.eos_ids

    def encode(self, chat: Chat) -> list[int]:
        require_plain(chat)
        messages = developer_as_system(chat.messages)
        require_roles(messages, self.ROLES)
        ids = [self._ids["<|begin_of_text|>"]]
        for message in messages:
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
    takes_system = True
    takes_tools = False

    def __init__(self, tokenizer: SentencePieceTokenizer, bos_id: int, eos_id: int) -> None:
        self._tokenizer = tokenizer
        self._bos_id, self._eos_id = bos_id, eos_id
        self.stop_ids = tokenizer.eos_ids

    def encode(self, chat: Chat) -> list[int]:
        require_plain(chat)
        messages = developer_as_system(chat.messages)
        require_roles(messages, self.ROLES)
        _refuse_tags(map(text_of, messages), self.TAGS, "Llama 2's chat format")
        turns = self._turns(messages)
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
                "format allows a system message first, then alternating user and assistant "
                "messages, and needs a user message at the end"
            )
        contents = [text_of(message) for message in spoken]
        if system is not None:
            contents[0] = f"<<SYS>>\n{system}\n<</SYS>>\n\n{contents[0]}"
        return contents

    def _text(self, text: str) -> list[int]:
        return [self._bos_id, *self._tokenizer.encode(text, bos=False, special=False)]


_ROLES = ("system", "user", "assistant")
# Joins the parts of a message, consecutive messages of a role, and system texts with a question.
_JOINT = "\n\n"


class MistralChat:
    """Mistral's formats: questions between [INST] and [/INST], eos after each answer.

    The tags are text in version 1, and tokens later. System texts precede the first question in
    version 1 and the last one in versions 2 and 3; from version 7 they keep their position, between
    special tokens. Consecutive messages of one role are joined, except system messages from version
    7 on.

    Source: tokens/tokenizers/instruct.py in Mistral's mistral-common.
    """

    VERSIONS = (1, 2, 3, 7, 11, 13)
    TAGS = ("[INST]", "[/INST]")
    template_text = ""
    takes_system = True
    takes_tools = False

    def __init__(self, tokenizer: Tokenizer, version: int) -> None:
        self._tokenizer, self._version = tokenizer, version
        self.stop_ids = tokenizer.eos_ids

    def encode(self, chat: Chat) -> list[int]:
        if self._version not in self.VERSIONS:
            raise UsageError(
                f"version {self._version} of Mistral's chat format is not supported; supported: "
                f"{', '.join(map(str, self.VERSIONS))}; use a folder with a chat template"
            )
        require_plain(chat)
        messages = developer_as_system(chat.messages)
        _require_turns(messages)
        turns = [(message["role"], _text(message)) for message in messages]
        if self._version == 1:
            _refuse_tags((text for _, text in turns), self.TAGS, "Mistral's first chat format")
        ids = [self._special("<s>")]
        for role, text in self._in_prompt_order(turns):
            ids += self._turn(role, text)
        return ids

    def _in_prompt_order(self, turns: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """The turns in the order of the prompt. Consecutive turns of a role are joined.

        From version 7 on, this does not apply to the system messages.
        """
        system: list[str] = []
        ordered: list[tuple[str, str]] = []
        for role, same_role in groupby(turns, key=lambda turn: turn[0]):
            texts = [text for _, text in same_role]
            if role != "system":
                ordered.append((role, _joined(texts)))
            elif self._version >= 7:
                ordered += ((role, text) for text in texts)
            else:
                system += texts
        if self._version >= 7:
            return ordered
        if not ordered or ordered[0][0] != "user":
            ordered.insert(0, ("user", ""))
        questions = [index for index, (role, _) in enumerate(ordered) if role == "user"]
        target = questions[0 if self._version == 1 else -1]
        if prompt := _joined(system):
            ordered[target] = ("user", f"{prompt}{_JOINT}{ordered[target][1]}")
        return ordered

    def _turn(self, role: str, text: str) -> list[int]:
        if role == "system":
            return [
                self._special("[SYSTEM_PROMPT]"),
                *self._ids(text),
                self._special("[/SYSTEM_PROMPT]"),
            ]
        if role == "user" and self._version == 1:
            return self._ids(f"[INST] {text} [/INST]")
        if role == "user":
            return [self._special("[INST]"), *self._ids(text), self._special("[/INST]")]
        answer = text if self._version == 1 else text.rstrip(" ")
        return [*self._ids(answer), self._special("</s>")]

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, bos=False, special=False)

    def _special(self, text: str) -> int:
        id = self._tokenizer.vocabulary.special_ids.get(text)
        if id is None:
            raise CheckpointError(
                f"the tokenizer has no token {text}, which version {self._version} of Mistral's "
                "chat format needs"
            )
        return id


def _refuse_tags(texts: Iterable[str], tags: Sequence[str], chat_format: str) -> None:
    """Refuses messages that contain tags of a format in which tags are ordinary text."""
    for number, text in enumerate(texts):
        for tag in tags:
            if tag in text:
                raise UsageError(
                    f"messages[{number}] contains {tag}, which is markup of {chat_format}; "
                    "remove it"
                )


def _require_turns(messages: Sequence[Message]) -> None:
    require_roles(messages, _ROLES)
    roles = [message["role"] for message in messages]
    for number, role in enumerate(roles):
        if role == "assistant" and not _text(messages[number]):
            raise UsageError(f"messages[{number}] is an answer without text; remove it")
    if roles[-1] == "assistant" or ("assistant", "system") in pairwise(roles):
        raise UsageError(
            f"roles are {', '.join(roles):.200}; Mistral's format allows no system message after "
            "an answer, and no answer at the end"
        )


def _text(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else _joined([part["text"] for part in content])


def _joined(texts: Sequence[str]) -> str:
    return _JOINT.join(filter(None, texts))
