"""The OpenAPI description is valid, and describes the API as it is."""

import json

import jsonschema
import pytest

from parallel_llama.serve.app import OPERATIONS
from parallel_llama.serve.openapi import description

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def described(smollm2):
    return smollm2.get("/openapi.json")


def test_every_reference_leads_to_a_schema():
    text = json.dumps(description(OPERATIONS, "1"))
    schemas = json.loads(text)["components"]["schemas"]
    named = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert named <= schemas.keys() and len(named) > 20
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 2, "logprobs": True}, 200),
        ("/v1/completions", {"prompt": "One", "max_tokens": 2, "logprobs": 1, "echo": True}, 200),
        ("/v1/completions", {"prompt": "One", "temperature": -1}, 400),
        ("/v1/chat/completions", {"messages": QUESTION, "model": "another"}, 404),
        ("/tokenize", {"prompt": "One", "return_token_strs": True}, 200),
        ("/detokenize", {"tokens": [1, 2]}, 200),
        ("/tokenizer_info", None, 200),
        ("/v1/models", None, 200),
        ("/v1/models/smollm2", None, 200),
        ("/v1/models/another", None, 404),
        ("/status", None, 200),
    ],
)
def test_replies_match_the_openapi_schema(smollm2, described, path, body, expected):
    method = "get" if body is None else "post"
    status, _, reply = smollm2.send(method.upper(), path, body)
    assert status == expected, reply
    pattern = path if path in described["paths"] else "/v1/models/{name}"
    response = described["paths"][pattern][method]["responses"][str(status)]
    schema = response["content"]["application/json"]["schema"]
    jsonschema.validate(json.loads(reply), {**schema, "components": described["components"]})


def test_stream_events_match_the_openapi_schema(smollm2, described):
    operation = described["paths"]["/v1/chat/completions"]["post"]
    schema = operation["responses"]["200"]["content"]["text/event-stream"]["schema"]
    events = list(smollm2.events("/v1/chat/completions", messages=QUESTION, max_tokens=2))
    assert len(events) > 2
    for event in events:
        jsonschema.validate(event, {**schema, "components": described["components"]})
