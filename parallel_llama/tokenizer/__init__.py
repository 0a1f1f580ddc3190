"""Text to tokens and back: tokenizers, chat templates and streaming decode.

Nothing here knows the model; a tokenizer is told apart from the others by what is in its file.
"""

from parallel_llama.tokenizer.chat import Chat, ChatTemplate, Message, text_of
from parallel_llama.tokenizer.loading import load_chat_template, load_tokenizer
from parallel_llama.tokenizer.tokenizer import StreamDecoder, Tokenizer
from parallel_llama.tokenizer.vocabulary import Vocabulary

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
