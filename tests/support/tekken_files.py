"""Small files in the format of Mistral's tekken.json, as of its later versions."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizer_data import TEKKEN

SPECIALS = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]",
    "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]", "[AUDIO]", "[THINK]", "[/THINK]",
)  # fmt: skip


@cache
def tekken_file() -> dict[str, Any]:
    """The content of a real file, which callers must not change."""
    value: dict[str, Any] = json.loads(TEKKEN.read_text())
    return value


def write_tekken(folder: Path, version: int, **changes: Any) -> Path:
    """A tekken.json of 1,000 special tokens, the named ones listed, and 1,000 other tokens."""
    whole = tekken_file()
    listed = [
        {"rank": id, "token_str": text, "is_control": True} for id, text in enumerate(SPECIALS)
    ]
    config = {
        **whole["config"],
        "version": f"v{version}",
        "default_vocab_size": 2000,
        "num_vocab_tokens": 1050,
    }
    file = {
        "vocab": whole["vocab"][:1050],
        "special_tokens": listed,
        **changes,
        "config": {**config, **changes.get("config", {})},
    }
    path = folder / "tekken.json"
    path.write_text(json.dumps(file))
    return path


def specials(*texts: str, **changes: Any) -> dict[str, Any]:
    tokens = [{"rank": id, "token_str": text} for id, text in enumerate(("<s>", "</s>", *texts))]
    tokens[-1] |= changes
    return {"special_tokens": tokens}
