"""A complete tiny chat model on disk: HF weights, a tokenizer.json, a chat template."""

import json
from pathlib import Path

from tiny_models import TINY_MODELS, write_hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

TINY = TINY_MODELS["9/3"]
EOS, BOS, TURN = "<|end|>", "<|begin|>", "<|turn|>"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m['role'] }}: {{ m['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant: {% endif %}"
)


def write_chat_folder(folder: Path) -> Path:
    """A model of 211 tokens: 3 special tokens, then the most common bytes of text."""
    write_hf(TINY, folder)
    write_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"eos_token_id": 1, "bos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    return folder


def write_endless_folder(folder: Path) -> Path:
    """The same model with a context of 65536 tokens and without an end-of-text token."""
    write_chat_folder(folder)
    for name, changes in {
        "config.json": {"max_position_embeddings": 65536, "eos_token_id": None},
        "generation_config.json": {"eos_token_id": None},
        "tokenizer_config.json": {"eos_token": None},
    }.items():
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**settings, **changes}))
    return folder


def write_tokenizer(folder: Path) -> None:
    # One token per byte: space, newline and the printable bytes, which cover ASCII.
    alphabet = ["\u0120", "\u010a", *sorted(pre_tokenizers.ByteLevel.alphabet(), key=ord)]
    names = [BOS, EOS, TURN, *dict.fromkeys(alphabet)][: TINY.vocab_size]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(f"{BOS} $A", None, [(BOS, 0)])
    tokenizer.add_special_tokens([BOS, EOS, TURN])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": BOS, "eos_token": EOS, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
