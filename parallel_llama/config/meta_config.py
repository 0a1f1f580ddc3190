"""config.json beside Meta's params.json: ties, biases, context, rope scaling, width of a head.

It is HF's config.json with one key more, by which it is told from a config.json that somebody else
put there: only ours is known to belong to the weights.
"""

from collections.abc import Mapping
from typing import Any

from parallel_llama.config.hf_config import args_from_hf
from parallel_llama.config.hf_writing import hf_config
from parallel_llama.config.model_args import ModelArgs
from parallel_llama.config.params_writing import beyond_meta
from parallel_llama.errors import UsageError
from parallel_llama.fields import Fields

META_CONFIG_FORMAT = "parallel_llama meta 1"

_OWN_KEY = "parallel_llama"
_SHARED = ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size")


def meta_config(args: ModelArgs) -> dict[str, Any]:
    """The content of config.json in a Meta folder.

    Raises: UsageError for a rope scaling that config.json has no words for.
    """
    own = {"format": META_CONFIG_FORMAT, "beyond_params_json": beyond_meta(args)}
    return {**hf_config(args), _OWN_KEY: own}


def is_meta_config(values: Mapping[str, Any]) -> bool:
    """Whether a config.json was written for the params.json beside it."""
    return isinstance(values.get(_OWN_KEY), dict)


def args_from_meta_config(values: Mapping[str, Any], params: Mapping[str, Any]) -> ModelArgs:
    """The arguments that config.json states, after a look at what params.json says as well.

    Raises: UsageError as in `args_from_hf`, for another format, or if the two disagree.
    """
    version = Fields(Fields(values).mapping(_OWN_KEY)).text("format")
    if version != META_CONFIG_FORMAT:
        raise UsageError(f"has the format {version[:80]!r}; {META_CONFIG_FORMAT!r} is read")
    args = args_from_hf({key: value for key, value in values.items() if key != _OWN_KEY})
    for key in _SHARED:
        if (stated := params.get(key)) != getattr(args, key):
            raise UsageError(
                f"says {key}={getattr(args, key)} and params.json beside it {str(stated)[:80]}; "
                "use the two files that were written together"
            )
    return args
