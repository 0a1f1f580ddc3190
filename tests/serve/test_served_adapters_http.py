"""The `model` of a request to a server selects a LoRA adapter."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest
from adapters import write_adapter
from served import Served

from parallel_llama import LLM, SamplingParams
from parallel_llama.serve.adapters import MAX_ADAPTERS

NAMES = ["tiny", "sql", "poems"]
ASKED = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0.0}


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: str(
            write_adapter(
                folder / name, model, r".*\.\w+_proj", seed=seed, target_modules="all-linear"
            )
        )
        for seed, name in enumerate(NAMES[1:])
    }


@pytest.fixture(scope="module")
def server(model: Path, adapters: dict[str, str]) -> Iterator[Served]:
    flags = [f"--adapter={name}={folder}" for name, folder in adapters.items()]
    flags.append(f"--adapter-root={Path(adapters['sql']).parent}")
    with Served(f"--model={model}", "--served-model-name=tiny", "--nproc=2", *flags) as served:
        yield served


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_two_ranks_answer_with_each_adapter_as_one_rank_does(client, model, adapters):
    params = SamplingParams(max_tokens=ASKED["max_tokens"])
    with LLM(str(model), adapters=adapters, kv_cache_bytes=4 << 20) as llm:
        expected = [
            llm.generate(ASKED["prompt"], params, adapter=name)[0].text
            for name in (None, *NAMES[1:])
        ]
    replies = [client.completions.create(model=name, **ASKED) for name in NAMES]
    assert [reply.choices[0].text for reply in replies] == expected
    assert [reply.model for reply in replies] == NAMES
    assert len({*expected}) == 3


def test_a_chat_and_a_stream_name_the_adapter(client):
    chats = [
        client.chat.completions.create(
            model=name, messages=[{"role": "user", "content": "Hello"}], max_tokens=6, temperature=0
        )
        for name in NAMES
    ]
    assert [chat.model for chat in chats] == NAMES
    assert len({chat.choices[0].message.content for chat in chats}) == 3
    chunks = list(client.completions.create(model="sql", stream=True, **ASKED))
    assert {chunk.model for chunk in chunks} == {"sql"}


def test_models_lists_adapters_with_their_parent(client, server):
    assert [(each.id, each.parent) for each in client.models.list()] == [
        ("tiny", None), ("sql", "tiny"), ("poems", "tiny"),
    ]  # fmt: skip
    assert client.models.retrieve("poems").parent == "tiny"
    assert server.post("/tokenize", prompt="Hello", model="sql")["count"] > 1


def test_unknown_model_name_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="'prose' is not served here") as caught:
        client.completions.create(model="prose", **ASKED)
    assert caught.value.code == "model_not_found"


def change(server: Served, what: str, **body: object) -> tuple[int, str]:
    """Posts a change of adapters. Returns: the status, and the text or the error's message."""
    connection = server.connect()
    try:
        connection.request(
            "POST", f"/v1/{what}_lora_adapter", json.dumps(body),
            {"content-type": "application/json"},
        )  # fmt: skip
        response = connection.getresponse()
        text = response.read().decode()
    finally:
        connection.close()
    return response.status, text if response.status == 200 else json.loads(text)["error"]["message"]


def names_of(client: openai.OpenAI) -> list[str]:
    return [each.id for each in client.models.list()]


def test_clients_load_and_unload_adapters_in_the_folder_of_the_server(server, client):
    texts = [client.completions.create(model=name, **ASKED).choices[0].text for name in NAMES[1:]]
    for path, expected in zip(NAMES[1:], texts, strict=True):
        assert change(server, "load", lora_name="new", lora_path=path)[0] == 200
        assert names_of(client) == [*NAMES, "new"]
        reply = client.completions.create(model="new", **ASKED)
        assert (reply.model, reply.choices[0].text) == ("new", expected)
        status, text = change(server, "unload", lora_name="new")
        assert (status, text) == (200, "Success: LoRA adapter 'new' removed successfully.")
        assert names_of(client) == NAMES
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="new", **ASKED)


@pytest.mark.parametrize("what", ["load", "unload"])
@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data; boundary=x"])
def test_adapter_change_with_form_content_type_is_refused(server, client, what, kind):
    body = json.dumps({"lora_name": "sql", "lora_path": "sql"}).encode()
    status, _, text = server.send("POST", f"/v1/{what}_lora_adapter", body, {"content-type": kind})
    assert status == 415 and b"send application/json" in text
    assert names_of(client) == NAMES


def test_clients_cannot_fill_the_memory_with_adapters(server, client):
    """Without a limit, one folder could be loaded under any number of names."""
    names = [f"copy-{n}" for n in range(MAX_ADAPTERS - len(NAMES) + 1)]
    for name in names:
        assert change(server, "load", lora_name=name, lora_path="sql")[0] == 200
    status, text = change(server, "load", lora_name="more", lora_path="sql")
    assert status == 400 and f"{MAX_ADAPTERS} adapters are loaded" in text
    for name in names:
        assert change(server, "unload", lora_name=name)[0] == 200
    assert names_of(client) == NAMES


def test_restarted_server_drops_adapters_whose_folders_are_gone(model, tmp_path):
    """Regression: an adapter of --adapter ended the server, and another one stayed in the list."""
    own, kept, later = (
        write_adapter(tmp_path / name, model, r".*\.\w+_proj", target_modules="all-linear")
        for name in ("own", "kept", "later")
    )
    flags = [f"--adapter=own={own}", f"--adapter=kept={kept}", f"--adapter-root={tmp_path}"]
    with Served(f"--model={model}", "--served-model-name=tiny", *flags) as served:
        assert change(served, "load", lora_name="later", lora_path="later")[0] == 200
        for folder in (own, later):
            shutil.rmtree(folder)
        (engine,) = (
            child
            for child in psutil.Process(served.process.pid).children()
            if "parallel_llama.engine_process" in child.cmdline()
        )
        engine.kill()
        deadline_s = time.monotonic() + 120
        while (served.get("/status")["n_restarts"], served.get("/status")["state"]) != (1, "ready"):
            assert time.monotonic() < deadline_s, served.stderr
            time.sleep(0.05)
        assert [each["id"] for each in served.get("/v1/models")["data"]] == ["tiny", "kept"]
        for name, status in (("own", 404), ("later", 404), ("kept", 200)):
            assert served.send("POST", "/v1/completions", {**ASKED, "model": name})[0] == status
    for name, folder in (("own", own), ("later", later)):
        assert f"no longer served: adapter '{name}': {folder}: not a folder" in served.stderr


@pytest.mark.parametrize(
    ("what", "body", "status", "message"),
    [
        ("load", {"lora_name": "new", "lora_path": ".."}, 400, "outside of the folder"),
        ("load", {"lora_name": "new", "lora_path": "/etc"}, 400, "outside of the folder"),
        ("load", {"lora_name": "new", "lora_path": "a\0b"}, 400, "outside of the folder"),
        ("load", {"lora_name": "new", "lora_path": "nowhere"}, 400, "not a folder"),
        ("load", {"lora_name": "tiny", "lora_path": "sql"}, 400, "is in use or not printable"),
        ("load", {"lora_name": "sql", "lora_path": "sql"}, 400, "'sql' is loaded already"),
        ("load", {"lora_name": "", "lora_path": "sql"}, 400, "length >= 1"),
        ("unload", {"lora_name": "new"}, 404, "'new' is not loaded"),
        ("unload", {"lora_name": "tiny"}, 404, "'tiny' is not loaded"),
    ],
)
def test_invalid_adapter_change_is_refused(server, client, what, body, status, message):
    got, text = change(server, what, **body)
    assert got == status and message in text, text
    assert names_of(client) == NAMES
