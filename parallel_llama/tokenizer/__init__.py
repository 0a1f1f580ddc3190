"""Text to tokens and back: tokenizers, chat templates and streaming decode.

Nothing here depends on the model: the type of a tokenizer follows from its file's contents.
"""

from parallel_llama.tokenizer.chat import Chat, ChatTemplate, Message, text_of
from parallel_llama.tokenizer.loading import load_chat_template, load_tokenizer
from parallel_llama.tokenizer.tokenizer import StreamDecoder, Tokenizer, Vocabulary

__all__ = [
    "Chat",
    "ChatTemplate",
    "Message",
    "StreamDecoder",
    "Tokenizer",
    "Vocabulary",
    "load_chat_template",
    "load_tokenizer",
    "text_of",
]
