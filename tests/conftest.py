"""What all tests share, and which of them the fast tier leaves out."""

import os
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from parity_steps import use_torch_operators
from ranks import Pools

# What `launch/test.sh --fast` leaves out, by the beginnings of names, beside every test that has
# the fixture `ranks` and so runs on processes: commands in processes of their own, kills and limits
# that are waited for, models of real size, and the longest searches. What is left runs in this
# process, on one rank or on threads as ranks.
SLOW = (
    "tests/checkpoint/test_gguf.py::test_a_real_model_",
    "tests/checkpoint/test_gguf.py::test_every_type_is_decoded_",
    "tests/checkpoint/test_gptq_and_awq.py::test_greedy_tokens_",
    "tests/checkpoint/test_hf_folders.py::test_a_folder_that_transformers_made_of_a_gguf_file_",
    "tests/checkpoint/test_load.py::test_a_load_reads_each_byte_once",
    "tests/checkpoint/test_manifest.py::test_every_single_flipped_bit_",
    "tests/checkpoint/test_verify.py::test_a_damaged_model_does_not_answer",
    "tests/checkpoint/test_verify.py::test_a_flipped_bit_of_a_weight_file_",
    "tests/cli/",
    "tests/engine/test_engine.py::test_a_request_gets_",
    "tests/engine/test_engine.py::test_a_request_of_any_family_",
    "tests/engine/test_engine.py::test_windows_on_many_ranks_",
    "tests/engine/test_engine.py::test_the_mixes_meet_",
    "tests/engine/test_engine_attacks.py::test_text_ids_and_log_probabilities_",
    "tests/engine/test_kv_capacity.py::test_weights_that_find_no_room_",
    "tests/engine/test_sliding_windows.py",
    "tests/families/test_families_gguf.py",
    "tests/families/test_falcon.py",
    "tests/families/test_written.py",
    "tests/files/test_hub_cache.py::test_every_verb_",
    "tests/launch/test_compare.py::test_one_command_",
    "tests/launch/test_gpu.py::test_every_step_",
    "tests/launch/test_gpu.py::test_a_step_",
    "tests/model/test_parity.py::test_logits_at_every_size_",
    "tests/model/test_parity.py::test_the_reference_is_float64_",
    "tests/model/test_parity.py::test_prefill_at_once_",
    "tests/model/test_sharded_attention.py",
    "tests/ops/cuda/test_attention_kernels.py::test_what_it_computes_with_",
    "tests/ops/cuda/test_compile.py",
    "tests/ops/cuda/test_engine_on_kernels.py::test_requests_",
    "tests/ops/cuda/test_model.py",
    "tests/ops/test_kernels.py::test_queries_turn_and_keys_and_values_go_to_their_slots[2 threads",
    "tests/parallel/",
    "tests/reshard/test_crash.py",
    "tests/reshard/test_meta_layout.py::test_any_number_of_files_",
    "tests/reshard/test_quantised_folders.py::test_a_run_goes_on_",
    "tests/reshard/test_quantised_folders.py::test_greedy_tokens_",
    "tests/reshard/test_reshard.py::test_by_way_of_metas_files_",
    "tests/reshard/test_reshard.py::test_hf_to_native_to_hf_",
    "tests/reshard/test_reshard.py::test_transformers_computes_",
    "tests/reshard/test_reshard_smollm2.py",
    "tests/sampling/test_penalties.py::test_kept_sets_and_distributions_",
    "tests/sampling/test_penalties.py::test_ten_thousand_",
    "tests/sampling/test_sampling.py::test_ten_thousand_",
    "tests/sampling/test_sampling.py::test_the_kept_set_is_that_of_transformers_",
    "tests/serve/",
    "tests/structured/test_structured.py::test_a_grammar_that_takes_too_long_",
    "tests/structured/test_structured.py::test_a_hostile_grammar_",
    "tests/structured/test_structured.py::test_every_kind_of_tokenizer_",
    "tests/test_async_llm.py",
    "tests/test_llm.py",
    "tests/test_readme.py",
    "tests/test_smollm2.py",
    "tests/tokenizer/test_bounded_process.py",
    "tests/tokenizer/test_chat_template.py::test_a_hostile_template_",
    "tests/tokenizer/test_chat_template.py::test_real_constructs_",
    "tests/tokenizer/test_chat_template.py::test_smollm2_equals_transformers",
    "tests/tokenizer/test_chat_template.py::test_templates_of_other_families_",
    "tests/tokenizer/test_chat_template.py::test_the_default_limit_",
    "tests/tokenizer/test_chat_template.py::test_the_template_is_found_",
    "tests/tokenizer/test_mistral.py::test_ids_and_texts_",
    "tests/tokenizer/test_mistral_chat.py::test_the_template_of_a_hf_folder_",
    "tests/tokenizer/test_tokenizer.py::test_a_pattern_that_backtracks_",
    "tests/tokenizer/test_tokenizer.py::test_real_files_",
    "tests/tokenizer/test_tokenizer_damage.py",
    "tests/tokenizer/test_tokenizer_gguf.py::test_patterns_mean_the_same_",
)

# Kernels in Triton run in its interpreter where no GPU is. It is asked for before anything imports
# Triton, as transformers does.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# The same examples on every machine and in every run, however slow.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

# A shell's background jobs ignore Ctrl-C, and so would every process that a test starts and stops.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--torch-ops", action="store_true", help="run models on torch's operators")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: left out by launch/test.sh --fast")
    if config.getoption("--torch-ops"):
        use_torch_operators()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    n_slow: Counter[Path] = Counter()
    for item in items:
        if item.nodeid.startswith(SLOW) or "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")
            n_slow[item.path] += 1
    # Files with nothing but quick tests come last, where a long one would be waited for alone.
    items.sort(key=lambda item: not n_slow[item.path])


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What processes leave in the system's folder, as each torchrun does, goes with pytest's."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture(scope="session")
def decoded_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that `transformers_oracle.decoded_smollm2` fills once for all workers of a run."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "decoded smollm2"


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Iterator[Pools]:
    """`ranks(tp_size).run(function, *args)`: a function on real ranks, with its results."""
    pools = Pools(use_torch_operators if request.config.getoption("--torch-ops") else None)
    yield pools
    pools.end()
