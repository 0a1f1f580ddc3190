"""`verify` finds and names every fault of a model's files, and never ends in a traceback."""

import hashlib
import json
import os
import random
import re
import shutil
import struct
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from broken_gguf import BROKEN as BROKEN_GGUF
from checkpoint_samples import hf_name, write_gguf
from model_folders import NAMES, TINY, add_manifest, config_of, opened, write_folders
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from tiny_folder import write_chat_folder
from torch_archives import rewritten

from parallel_llama.checkpoint import file_manifest
from parallel_llama.checkpoint.manifest import hash_file, read_manifest, write_manifest
from parallel_llama.checkpoint.verify import verify
from parallel_llama.cli.main import main
from parallel_llama.engine.llm_config import LLMConfig
from parallel_llama.engine.setup import ModelSetup
from parallel_llama.families import parameters

DATA_FLIPS = 24  # of each folder, anywhere in its weight files
OTHER_FLIPS = 16  # of each folder, in headers, JSON files and the manifest
PLACE = re.compile(r"([^:]+): damaged in (\S+), bytes (\d+) to (\d+)(?: \(unit \d+\))?")
MAX_CPU_SECONDS = 10.0
MAX_MEMORY = 256 << 20

Copy = Callable[[str], Path]
Check = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_folders(tmp_path_factory.mktemp("folders"))


@pytest.fixture
def copy(folders: dict[str, Path], tmp_path: Path) -> Copy:
    def copied(name: str) -> Path:
        return shutil.copytree(folders[name], tmp_path / name)

    return copied


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Check:
    """Exit code and JSON of a `verify` command line."""

    def run(*argv: object) -> tuple[int, dict[str, Any]]:
        code = main(["verify", *map(str, argv), "--json"])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return code, json.loads(out)

    return run


def problems_of(folder: Path, against: Path | None = None) -> list[str]:
    return verify(str(folder), None if against is None else str(against)).problems


@pytest.mark.parametrize("name", NAMES)
def test_undamaged_folder_passes_and_everything_is_hashed(folders, check, name):
    code, report = check(folders[name])
    n_tensors = 21
    n_files = len(list(folders[name].iterdir())) - 1
    assert code == 0
    assert report == {
        "ok": True,
        "files": n_files,
        "tensors": n_tensors,
        "hashed": n_tensors + n_files,
        "bytes": sum(
            p.stat().st_size for p in folders[name].iterdir() if p.name != "manifest.json"
        ),
        "problems": [],
        "notes": [],
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_without_a_manifest_is_checked_for_structure(copy, check, name):
    folder = copy(name)
    (folder / "manifest.json").unlink()
    code, report = check(folder)
    assert (code, report["ok"], report["hashed"], report["tensors"]) == (0, True, 0, 21)


# One flipped bit.


def tensor_locations(path: Path) -> dict[str, range]:
    """The byte range of each tensor in a weight file, by Meta's name, found without the package."""
    if path.suffix == ".pth":
        return _torch_locations(path)
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    _, args, _ = opened(path.parent)
    meta = {hf_name(param.name): param.name for param in parameters(args)}
    return {
        meta.get(name, name): range(*(8 + length + offset for offset in entry["data_offsets"]))
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _torch_locations(path: Path) -> dict[str, range]:
    """torch.save numbers the storages in the order of the dictionary."""
    names = list(torch.load(path, weights_only=True))
    locations = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for number, name in enumerate(names):
            info = archive.getinfo(f"{path.stem}/data/{number}")
            file.seek(info.header_offset + 26)
            name_length, extra_length = struct.unpack("<HH", file.read(4))
            start = info.header_offset + 30 + name_length + extra_length
            locations[name] = range(start, start + info.file_size)
    return locations


def flipped(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def assert_named(found: list[str], path: Path, at: int, locations: dict[str, range]) -> None:
    held = [(name, location) for name, location in locations.items() if at in location]
    if not held:
        assert len(found) == 1, found
        assert found[0].startswith(f"{path.name}: damaged "), found
        assert "header" in found[0]
        return
    ((name, location),) = held
    assert len(found) == 1, found
    match = PLACE.fullmatch(found[0])
    assert match is not None, found
    assert match[1] == path.name
    assert match[2] == name
    start, stop = int(match[3]), int(match[4])
    assert location.start <= start <= at < stop <= location.stop
    if path.name.startswith("weights-") and ".w1." in name:
        assert stop - start == len(location) * 2 // TINY.ffn_dim  # a unit of two channels


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_flipped_bit_in_a_weight_file_is_reported_with_tensor_and_bytes(copy, check, name):
    folder, random_source = copy(name), random.Random(name)
    paths = sorted(p for p in folder.iterdir() if p.suffix in (".pth", ".safetensors"))
    locations = {path: tensor_locations(path) for path in paths}
    for _ in range(DATA_FLIPS):
        path = random_source.choice(paths)
        bit = random_source.randrange(path.stat().st_size * 8)
        flipped(path, bit)
        code, report = check(folder)
        assert (code, report["ok"]) == (1, False), f"{path.name}, bit {bit}"
        assert_named(report["problems"], path, bit // 8, locations[path])
        flipped(path, bit)
    assert check(folder)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_flipped_bit_outside_tensors_is_reported_with_its_file(copy, check, name):
    """Headers, the zip's own records, JSON files, the index, the manifest."""
    folder, random_source = copy(name), random.Random(name)
    spots = [spot for path in sorted(folder.iterdir()) for spot in outside_tensors(path)]
    for _ in range(OTHER_FLIPS):
        path, span = random_source.choice(spots)
        bit = random_source.randrange(span.start * 8, span.stop * 8)
        flipped(path, bit)
        code, report = check(folder)
        assert code == 1, f"{path.name}, bit {bit}"
        assert len(report["problems"]) == 1, report["problems"]
        assert path.name in report["problems"][0].split(": ")[0], report["problems"]
        flipped(path, bit)
    assert check(folder)[0] == 0


def outside_tensors(path: Path) -> Iterator[tuple[Path, range]]:
    at = 0
    if path.suffix in (".pth", ".safetensors"):
        for location in sorted(tensor_locations(path).values(), key=lambda held: held.start):
            if at < location.start:
                yield path, range(at, location.start)
            at = location.stop
    if at < path.stat().st_size:
        yield path, range(at, path.stat().st_size)


def test_contradictory_zip_directory_is_reported_as_damage(copy):
    """zipfile.is_zipfile raises for such a file."""
    folder = copy("meta of 2")
    path = folder / "consolidated.01.pth"
    locator = path.read_bytes().rindex(b"PK\x06\x07")
    flipped(path, 8 * (locator + 16) + 1)  # 3 disks instead of 1
    (line,) = problems_of(folder)
    assert line.startswith("consolidated.01.pth: damaged in its header")
    (folder / "manifest.json").unlink()
    assert "consolidated.01.pth: damaged zip archive" in problems_of(folder)[0]


def test_every_damaged_file_is_reported(copy):
    folder = copy("meta of 2")
    for path in (folder / "consolidated.00.pth", folder / "consolidated.01.pth"):
        location = tensor_locations(path)["layers.1.feed_forward.w2.weight"]
        flipped(path, location.start * 8)
    flipped(folder / "params.json", 8)
    found = problems_of(folder)
    assert len(found) == 3
    assert found[0].startswith("consolidated.00.pth")
    assert found[1].startswith("consolidated.01.pth")
    assert found[2].startswith("params.json: damaged")


# Files.


def test_missing_truncated_and_grown_files_are_named(copy):
    folder = copy("hf of 2 files")
    first, second = sorted(folder.glob("*.safetensors"))
    first.unlink()
    os.truncate(second, 100)
    with (folder / "config.json").open("a") as file:
        file.write(" ")
    found = "\n".join(problems_of(folder))
    assert f"{first.name}: missing" in found
    assert f"{second.name}: truncated: has 100 bytes, expected" in found
    assert "config.json: too long" in found


def test_unlisted_file_is_a_problem_only_if_a_model_would_read_it(copy, check):
    folder = copy("hf")
    (folder / "LICENSE").write_text("yes")
    code, report = check(folder)
    assert (code, report["notes"]) == (0, ["LICENSE: not in manifest.json"])
    for name in ("tokenizer.json", "tokenizer.model.v3"):
        (folder / name).write_text("{}")
        code, report = check(folder)
        assert code == 1
        assert f"{name}: not in manifest.json" in report["problems"][0]
        (folder / name).unlink()


def test_unlisted_template_in_a_subfolder_is_a_problem(copy, check):
    folder = copy("hf")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ x }}")
    code, report = check(folder)
    assert code == 1
    assert "additional_chat_templates/tools.jinja: not in" in report["problems"][0]


def test_a_link_out_of_the_folder_is_refused(copy, tmp_path):
    folder = copy("hf")
    (folder / "config.json").rename(tmp_path / "config.json")
    (folder / "config.json").symlink_to(tmp_path / "config.json")
    assert "a link leads outside the folder" in problems_of(folder)[0]


def test_a_pipe_in_place_of_a_file_does_not_hang(copy):
    folder = copy("hf")
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    assert "config.json: missing" in problems_of(folder)[0]


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors"]
)
def test_an_index_that_leads_out_of_the_folder_is_a_problem(copy, name):
    folder = copy("hf of 2 files")
    (folder / "manifest.json").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert "is outside the folder" in problems_of(folder)[0]


def test_wrong_tensor_hash_in_the_manifest_is_a_problem(copy):
    """All files match the manifest, so only reading the tensors can find the fault."""
    folder = copy("meta of 2")
    manifest = read_manifest(folder)
    wrong = replace(manifest.tensors["norm.weight"], blake3="0" * 64)
    write_manifest(folder, replace(manifest, tensors={**manifest.tensors, "norm.weight": wrong}))
    assert problems_of(folder) == ["norm.weight: differs from manifest.json"]


# Meta's checklist.


def checklist(folder: Path, names: list[str]) -> None:
    lines = [f"{hashlib.md5((folder / name).read_bytes()).hexdigest()}  {name}" for name in names]
    (folder / "checklist.chk").write_text("\n".join(lines) + "\n")


def test_metas_checklist_is_checked(copy):
    folder = copy("meta of 2")
    (folder / "manifest.json").unlink()
    checklist(folder, ["params.json", "consolidated.00.pth", "consolidated.01.pth"])
    report = verify(str(folder))
    assert (report.problems, report.hashed) == ([], 3)
    location = tensor_locations(folder / "consolidated.01.pth")["norm.weight"]
    flipped(folder / "consolidated.01.pth", location.start * 8)
    assert [line for line in problems_of(folder) if "consolidated.01.pth" in line]


@pytest.mark.parametrize(
    "line",
    ["x", "0" * 32 + "  ../a", "0" * 32 + "  none.pth", "0" * 32, "\udcff", "0" * 32 + "  .."],
)
def test_a_broken_checklist_is_a_problem(copy, line):
    folder = copy("meta of 2")
    (folder / "manifest.json").unlink()
    (folder / "checklist.chk").write_bytes(line.encode("utf-8", "surrogateescape"))
    assert len(problems_of(folder)) == 1


# Broken files: each is a problem, within bounds of CPU time and memory.


def assert_bounded(folder: Path, expected: str = "") -> None:
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = peak_bytes()
    started = time.process_time()
    found = problems_of(folder)
    assert time.process_time() - started < MAX_CPU_SECONDS
    assert peak_bytes() - before < MAX_MEMORY
    assert found
    assert re.search(expected, "\n".join(found)), found


def peak_bytes() -> int:
    """The largest memory of this process since the last reset."""
    (kilobytes,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kilobytes) << 10


GOOD = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
HEADERS: dict[str, object] = {
    "an overlap": {"a": GOOD, "b": GOOD},
    "deep nesting": "[" * 100_000,
    "a name that leads elsewhere": {"../a": GOOD},
    "a tensor of no model": {"a": GOOD},
}


@pytest.mark.parametrize("name", HEADERS)
@pytest.mark.parametrize("has_manifest", [True, False])
def test_a_forged_safetensors_header_is_a_problem(copy, name, has_manifest):
    folder, header = copy("hf"), HEADERS[name]
    text = header if isinstance(header, str | bytes) else json.dumps(header)
    raw = text.encode() if isinstance(text, str) else text
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(16))
    if not has_manifest:
        (folder / "manifest.json").unlink()
    assert_bounded(folder, "model.safetensors|the tensors do not fit")


@pytest.mark.parametrize("raw", [b"", b"1234567", struct.pack("<Q", 2**64 - 1), b"\0" * 8])
def test_invalid_safetensors_file_is_a_problem(copy, raw):
    folder = copy("hf")
    (folder / "manifest.json").unlink()
    (folder / "model.safetensors").write_bytes(raw)
    assert_bounded(folder, "model.safetensors")


def repacked(
    change: Callable[[dict[str, bytes]], object], compression: int = zipfile.ZIP_STORED
) -> Callable[[Path], None]:
    return lambda path: rewritten(path, change, compression)


def saved(content: object, **options: bool) -> Callable[[Path], None]:
    return lambda path: torch.save(content, path, **options)


def resized(size: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, size)


class Payload:
    """Ends the tests if a careless reader unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (66,)


ARCHIVE = "consolidated.01"
TORCH: dict[str, Callable[[Path], None]] = {
    "no bytes": resized(0),
    "half a file": resized(50_000),
    "a file with a hole behind it": resized(1 << 30),
    "not a zip": lambda path: path.write_bytes(b"x" * 1000) and None,
    "code": saved({"norm.weight": Payload()}),
    "an empty dictionary": saved({}),
    "another model": saved({"norm.weight": torch.ones(3)}),
    "no pickle": repacked(lambda r: r.pop(f"{ARCHIVE}/data.pkl")),
    "an empty pickle": repacked(lambda r: r.update({f"{ARCHIVE}/data.pkl": b""})),
    "a pickle of noise": repacked(lambda r: r.update({f"{ARCHIVE}/data.pkl": bytes(range(256))})),
}


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("has_manifest", [True, False])
def test_a_forged_torch_file_is_a_problem(copy, name, has_manifest):
    folder = copy("meta of 2")
    TORCH[name](folder / "consolidated.01.pth")
    if not has_manifest:
        (folder / "manifest.json").unlink()
    assert_bounded(folder, "consolidated.01.pth")


INDICES: dict[str, object] = {
    "a very long name": {"weight_map": {"a": "a" * 5000 + ".safetensors"}},
    "the folder itself": {"weight_map": {"a": ".safetensors"}},
    "deep nesting": "[" * 100_000,
    "a number of 5000 digits": '{"weight_map": ' + "9" * 5000 + "}",
    "a tensor of no file": {"weight_map": {"a": "model-00001-of-00002.safetensors"}},
    "a home path": {"weight_map": {"a": "~/x.safetensors"}},
}


@pytest.mark.parametrize("name", INDICES)
@pytest.mark.parametrize("has_manifest", [True, False])
def test_a_forged_index_is_a_problem(copy, name, has_manifest):
    folder, index = copy("hf of 2 files"), INDICES[name]
    text = index if isinstance(index, str | bytes) else json.dumps(index)
    raw = text.encode() if isinstance(text, str) else text
    (folder / "model.safetensors.index.json").write_bytes(raw)
    if not has_manifest:
        (folder / "manifest.json").unlink()
    assert_bounded(folder)


@pytest.mark.parametrize("name", [*BROKEN_GGUF][::6])
def test_a_broken_gguf_file_is_a_problem(tmp_path, name):
    content, _ = BROKEN_GGUF[name]
    path = tmp_path / "m.gguf"
    path.write_bytes(content if isinstance(content, bytes) else content.to_bytes())
    assert_bounded(path, "m.gguf")


@pytest.mark.parametrize("error", [RecursionError, MemoryError, KeyError, struct.error])
def test_unexpected_exception_is_reported_as_a_problem(folders, monkeypatch, error):
    def fails(*_: object) -> None:
        raise error("unforeseen")

    monkeypatch.setattr("parallel_llama.checkpoint.verify.open_checkpoint", fails)
    found = problems_of(folders["hf"])
    assert found
    assert "unforeseen" in found[0]


# Against another model.


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("has_manifests", [True, False])
def test_layouts_of_one_model_compare_as_equal(folders, copy, check, name, has_manifests):
    other = NAMES[NAMES.index(name) - 1]
    one, two = (folders[n] if has_manifests else copy(n) for n in (name, other))
    if not has_manifests:
        (one / "manifest.json").unlink()
        (two / "manifest.json").unlink()
    code, report = check(one, "--against", two)
    assert (code, report["problems"]) == (0, [])


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """An HF folder with other tensors and no manifest."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    (folder / "manifest.json").unlink()
    return folder


WQ = "model.layers.1.self_attn.q_proj.weight"


def test_tensors_that_differ_are_named(copy, folders, check):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[WQ][3, 5] += 1
        tensors["model.norm.weight"] = tensors["model.norm.weight"].float()

    folder = changed(copy("hf"), change)
    expected = [
        "layers.1.attention.wq.weight: its values differ",
        "norm.weight: its dtype is float32 here and float64 there",
    ]
    code, report = check(folder, "--against", folders["meta of 2"])
    assert (code, report["problems"]) == (1, expected)
    code, report = check(folders["native of 2"], "--against", folder)
    assert (code, len(report["problems"])) == (1, 2)


def test_shapes_and_arguments_that_differ_are_named(copy, folders):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("lm_head.weight", "model.embed_tokens.weight"):
            tensors[name] = tensors[name][:100].clone()

    folder = changed(copy("hf"), change)
    config = {**config_of(folder), "vocab_size": 100, "rms_norm_eps": 1e-6}
    (folder / "config.json").write_text(json.dumps(config))
    assert problems_of(folder, folders["hf"]) == [
        "vocab_size is 100 here and 128 there",
        "norm_eps is 1e-06 here and 1e-05 there",
        "tok_embeddings.weight: its shape is [100, 64] here and [128, 64] there",
        "output.weight: its shape is [100, 64] here and [128, 64] there",
    ]


def test_layers_that_one_model_lacks_are_named(copy, folders):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".layers.1." in name]:
            del tensors[name]

    folder = changed(copy("hf"), change)
    config = {**config_of(folder), "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    found = problems_of(folder, folders["hf"])
    assert found[0] == "n_layers is 1 here and 2 there"
    assert found[1] == "layers.1.attention_norm.weight: only there"
    assert len(found) == 1 + 9


def test_stored_and_omitted_tied_heads_compare_as_equal(copy):
    """Meta's files store head and embeddings; an HF folder may store only the embeddings."""

    def tie(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def leave_out(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["lm_head.weight"]

    both, one = changed(copy("hf"), tie), copy("hf of 2 files")
    shutil.rmtree(one)
    shutil.copytree(both, one)
    add_manifest(one)
    changed(one, leave_out)
    config = {**config_of(one), "tie_word_embeddings": True}
    (one / "config.json").write_text(json.dumps(config))
    assert problems_of(one, both) == []
    assert problems_of(both, one) == []


def test_damage_in_the_other_model_is_reported_with_its_folder(copy, folders):
    folder = copy("meta of 2")
    flipped(folder / "consolidated.00.pth", 8 * 100_000)
    found = problems_of(folders["hf"], folder)
    assert len(found) == 2
    assert "its values differ" in found[0]
    assert f"{folder}: " in found[1]
    (folder / "params.json").unlink()
    assert str(folder) in problems_of(folders["hf"], folder)[0]


def test_gguf_file_can_be_compared_with_an_hf_folder(folders, tmp_path):
    def narrow(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: tensor.float() for name, tensor in tensors.items()})

    folder = changed(shutil.copytree(folders["hf"], tmp_path / "hf"), narrow)
    _, args, checkpoint = opened(folder)
    weights = {p.name: checkpoint.read(p, range(p.shape[p.dim])) for p in parameters(args)}
    write_gguf(tmp_path / "m.gguf", args, weights, {})
    assert problems_of(tmp_path / "m.gguf", folder) == []
    weights["norm.weight"][3] += 1
    write_gguf(tmp_path / "m.gguf", args, weights, {})
    assert problems_of(tmp_path / "m.gguf", folder) == ["norm.weight: its values differ"]


# The command line.


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ([], "needs DIR"),
        (["a", "b"], "unexpected argument 'b'"),
        (["no-such-folder"], "not a path that exists"),
        (["llama-2-7b"], "a shape without weights"),
        (["."], None),
        ([".", "--against", "no-such-folder"], "not a path that exists"),
        ([".", "--agains", "x"], "did you mean"),
    ],
)
def test_usage_errors_exit_with_2_and_problems_with_1(tmp_path, monkeypatch, capsys, argv, reason):
    monkeypatch.chdir(tmp_path)
    assert main(["verify", *argv]) == (1 if reason is None else 2)
    assert (reason or "") in capsys.readouterr().err


def test_text_output_has_a_line_per_problem_and_a_summary(copy, capsys):
    folder = copy("hf")
    assert main(["verify", str(folder)]) == 0
    assert "whole (3 files, 21 tensors, " in capsys.readouterr().out
    (folder / "generation_config.json").unlink()
    flipped(folder / "model.safetensors", 8 * 100_000)
    assert main(["verify", str(folder)]) == 1
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.endswith("generation_config.json: missing; manifest.json lists it")
    assert "model.safetensors: damaged in " in second
    assert "2 problems (2 files, " in last


# --verify of the verbs that run a model.


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_chat_folder(tmp_path_factory.mktemp("chat") / "model")
    add_manifest(folder)
    return folder


ANSWER = ["--prompt", "x", "--max-tokens", "1", "--verify"]


def test_undamaged_model_generates_after_verify(chat_folder, capfd):
    assert main(["generate", "--model", str(chat_folder), *ANSWER, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "file",
    ["model.safetensors", "config.json", "tokenizer.json", "manifest.json", "header", "missing"],
)
@pytest.mark.parametrize("nproc", ["1", "2"])
def test_damaged_model_does_not_generate(chat_folder, tmp_path, capfd, file, nproc):
    """Two ranks check different files, so damage that only one rank finds must end both."""
    folder = shutil.copytree(chat_folder, tmp_path / "model")
    path = folder / ("model.safetensors" if file in ("header", "missing") else file)
    flipped(path, 8 * 20 if file == "header" else 8 * (path.stat().st_size - 20))
    if file == "missing":
        path.unlink()
    assert main(["generate", "--model", str(folder), *ANSWER, "--nproc", nproc]) in (
        (1, 2) if file == "missing" else (1,)
    )
    out, err = capfd.readouterr()
    assert out == ""
    assert path.name in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("own", "n_local"),
    [
        ({"LOCAL_WORLD_SIZE": "2"}, 2),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "1"}, 2),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, 1),
        ({"MASTER_ADDR": "10.0.0.1"}, 1),
        ({"MASTER_ADDR": "127.0.0.1"}, 2),
    ],
    ids=["one host", "virtual local ranks", "two hosts", "unknown hosts", "loopback"],
)
def test_ranks_of_a_host_together_verify_all_files_of_its_copy(
    chat_folder, monkeypatch, own, n_local
):
    """Regression: each of two hosts with one rank verified only half of the files of its copy."""
    hashed: list[str] = []

    def record(path: Path, *_: object) -> str:
        hashed.append(path.name)
        return hash_file(path)

    monkeypatch.setattr(file_manifest, "hash_file", record)
    for rank in range(2):
        local_rank = {"LOCAL_RANK": str(rank)} if "LOCAL_WORLD_SIZE" in own else {}
        for name, value in {"RANK": str(rank), "WORLD_SIZE": "2", **local_rank, **own}.items():
            monkeypatch.setenv(name, value)
        ModelSetup(LLMConfig(str(chat_folder), device="cpu", verify=True))
    assert sorted(hashed) == sorted([*read_manifest(chat_folder).files] * (2 // n_local))


@pytest.mark.parametrize("verb", ["generate", "score"])
def test_a_model_without_a_manifest_cannot_be_verified(chat_folder, tmp_path, capsys, verb):
    folder = shutil.copytree(chat_folder, tmp_path / "model")
    (folder / "manifest.json").unlink()
    asked = ["--prompt", "x"] if verb == "generate" else ["--tokens-file", "ids.json"]
    (tmp_path / "ids.json").write_text("[1, 2, 3]")
    if verb == "score":
        asked[1] = str(tmp_path / "ids.json")
    assert main([verb, "--model", str(folder), *asked, "--verify"]) == 2
    assert "has no manifest.json to verify against" in capsys.readouterr().err


def test_random_weights_cannot_be_verified(capsys):
    argv = ["generate", "--model", "llama-2-7b", "--random-weights", "1", *ANSWER]
    assert main(argv) == 2
    assert "random weights have no files to --verify" in capsys.readouterr().err
