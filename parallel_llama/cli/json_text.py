"""JSON that a person wrote."""

import json
from typing import Any


def parse_json(text: str) -> Any:
    """A JSON value; ValueError says where it is broken."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at character {error.pos})") from None
    except RecursionError:
        raise ValueError("not usable JSON: it is nested too deeply") from None
