"""The routes that load and unload LoRA adapters while the server runs, like those of vLLM.

They exist only if the server has a folder from which clients may load adapters.

Source: /v1/load_lora_adapter and /v1/unload_lora_adapter of vLLM 0.32.
"""

from contextlib import suppress
from pathlib import Path

from starlette.responses import Response

from parallel_llama.errors import UnreadableFile, UsageError, shown
from parallel_llama.files.bounded_files import resolved
from parallel_llama.serve.bodies import LoadAdapterBody, UnloadAdapterBody
from parallel_llama.serve.service import RequestContext

MAX_ADAPTERS = 32  # clients could fill the memory of the ranks otherwise


async def load_adapter(context: RequestContext, body: LoadAdapterBody) -> Response:
    """Loads an adapter; requests may then name it."""
    service, name = context.service, body.lora_name
    assert service.adapter_root is not None
    if name in service.names or not name.isprintable():
        raise UsageError(f"lora_name={shown(name)} is in use or not printable; give another name")
    folder = _folder_in(service.adapter_root, body.lora_path)
    async with service.adapter_change:
        if len(service.adapters) >= MAX_ADAPTERS:
            raise UsageError(f"{MAX_ADAPTERS} adapters are loaded, the maximum; unload one first")
        # Not cancelled if the client disconnects, because the engine would continue.
        await service.engine.change_adapter(name, str(folder))
    return _success(f"LoRA adapter {name!r} added")


async def unload_adapter(context: RequestContext, body: UnloadAdapterBody) -> Response:
    """Unloads an adapter that no request uses."""
    service, name = context.service, body.lora_name
    async with service.adapter_change:
        service.engine.require_adapter(name)
        await service.engine.change_adapter(name, None)
    return _success(f"LoRA adapter {name!r} removed")


def _folder_in(root: Path, path: str) -> Path:
    """The folder at a path relative to `root`.

    Raises: UsageError for a folder outside of it, and for a path that cannot be resolved.
    """
    home = resolved(root)
    with suppress(UnreadableFile):
        folder = resolved(root / path)
        if folder.is_relative_to(home):
            return folder
    raise UsageError(
        f"lora_path={shown(path)}: outside of the folder that this server loads adapters from; "
        "give a path in that folder"
    )


def _success(what: str) -> Response:
    return Response(f"Success: {what} successfully.", media_type="text/plain")
