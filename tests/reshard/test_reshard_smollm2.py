"""The embedded GGUF model in other layouts: the same weights, tokenizer and answers."""

import os
from pathlib import Path

import pytest
import torch
from reshard_samples import tensors_of
from smollm2 import CAPITAL, parallel_llama
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers_oracle import decoded_smollm2

from parallel_llama.checkpoint.reading import open_checkpoint
from parallel_llama.checkpoint.verify import verify
from parallel_llama.config.layouts import load_generation_defaults, load_model_args
from parallel_llama.engine.input_processor import InputProcessor
from parallel_llama.families import parameters
from parallel_llama.files.model_files import find_model
from parallel_llama.plan import make_plan
from parallel_llama.reshard.reshard import reshard
from parallel_llama.tokenizer import Chat

pytestmark = pytest.mark.slow

GGUF = find_model("smollm2")
TEXTS = [
    "",
    "The capital of France is Paris.",
    "  two  spaces\n\n\tand 12345 digits",
    "def f(x):\n    return x  # ok",
    "<|im_start|>user\nhi<|im_end|>",
    "\u00e9\u4e16\u754c \U0001f600\u200d",
]
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    where = tmp_path_factory.mktemp("smollm2")
    for layout in ("hf", "native"):
        reshard(GGUF, where / layout, layout=layout, n_parts=3)
    return {layout: where / layout for layout in ("hf", "native")}


def test_every_tensor_is_the_one_that_transformers_decodes(folders, decoded_folder):
    model = decoded_smollm2(decoded_folder)
    expected = {n: t for n, t in model.state_dict().items() if n != "lm_head.weight"}
    written = tensors_of(folders["hf"])
    assert written.keys() == expected.keys()
    for name, tensor in written.items():
        assert tensor.dtype == torch.float32 and tensor.equal(expected[name]), name


def test_transformers_finds_the_whole_model_in_the_folder(folders):
    model, report = AutoModelForCausalLM.from_pretrained(
        folders["hf"], output_loading_info=True, dtype=torch.float32
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.config.tie_word_embeddings and model.config.eos_token_id == 2


@pytest.mark.parametrize("layout", ["hf", "native"])
def test_written_tokenizer_encodes_like_the_gguf_tokenizer(folders, layout):
    files = find_model(str(folders[layout]))
    one, other = (InputProcessor(f, load_model_args(f)) for f in (GGUF, files))
    for text in TEXTS:
        assert one.tokenizer.encode(text) == other.tokenizer.encode(text)
    ids = list(range(0, one.tokenizer.vocab_size, 7))
    assert one.tokenizer.decode(ids) == other.tokenizer.decode(ids)
    assert one.chat_template.encode(Chat(MESSAGES)) == other.chat_template.encode(Chat(MESSAGES))
    assert load_generation_defaults(files).eos_ids == load_generation_defaults(GGUF).eos_ids


def test_transformers_encodes_the_same_with_the_written_tokenizer(folders):
    theirs = AutoTokenizer.from_pretrained(folders["hf"])
    ours = InputProcessor(GGUF, load_model_args(GGUF))
    for text in TEXTS:
        assert theirs.encode(text) == ours.tokenizer.encode(text)
    chat = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True)
    assert list(chat["input_ids"]) == ours.chat_template.encode(Chat(MESSAGES))


@pytest.mark.parametrize("layout", ["hf", "native"])
def test_written_folder_verifies_against_the_gguf_file(folders, layout):
    report = verify(str(folders[layout]), against="smollm2")
    assert not report.problems and report.hashed


@pytest.mark.parametrize("tp_size", [1, 2, 3])
def test_all_ranks_together_read_the_folder_little_more_than_once(folders, tp_size, monkeypatch):
    """Every rank reads the norms; nothing else is read twice unless ranks share a KV head."""
    files = find_model(str(folders["native"]))
    args = load_model_args(files)
    checkpoint = open_checkpoint(files, args)
    n_read, real = [], os.preadv

    def counted(descriptor, buffers, offset):
        n_read.append(real(descriptor, buffers, offset))
        return n_read[-1]

    monkeypatch.setattr(os, "preadv", counted)
    shards = make_plan(args, tp_size).shards
    for shard in shards:
        for param in parameters(args):
            checkpoint.read(param, shard.rows_of(param))
    checkpoint.close()
    n_params = len(list(parameters(args)))
    assert len(n_read) == tp_size * n_params
    folder_bytes = sum(path.stat().st_size for path in files.weights)
    assert sum(n_read) / folder_bytes < (1.001 if tp_size != 2 else 1.05)


@pytest.fixture(scope="module")
def answer() -> list[dict]:
    return parallel_llama(*CAPITAL, "--quant=none", "--nproc=1")


@pytest.mark.parametrize("nproc", [2, 3])
def test_the_native_folder_gives_the_answer_of_the_decoded_gguf_file(folders, answer, nproc):
    command = [flag for flag in CAPITAL if not flag.startswith("--model")]
    assert parallel_llama(*command, f"--model={folders['native']}", f"--nproc={nproc}") == answer
