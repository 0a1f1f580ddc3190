"""Rendering of a model's own chat template, which is untrusted code, within hard limits."""

from collections.abc import Mapping
from typing import Any

from parallel_llama.errors import CheckpointError, UsageError
from parallel_llama.tokenizer.bounded_process import BoundedProcess, Request, Stopped

# Templates in use take up to 0.1 s to compile, and up to 25 us a character where they loop over
# all messages for each of them.
RENDER_CPU_S = 1.5
RENDER_CPU_S_PER_BYTE = 100e-6
MAX_EXTRA_BYTES = 192 << 20


class TemplateRenderer:
    """Renders templates for any thread, one after the other, in a process started when needed."""

    def __init__(self, cpu_s: float = RENDER_CPU_S) -> None:
        self._cpu_s = cpu_s
        self._process = BoundedProcess("template_job", MAX_EXTRA_BYTES)

    def render(self, template: str, context: Mapping[str, Any], source: str) -> str:
        """The text of a template, given the names it may use.

        Raises: UsageError if the template refuses the messages or cannot render them,
        CheckpointError if it is no template or goes beyond the limits. Both name `source`.
        """
        fields = {"template": template, "context": context}
        try:
            reply = self._process.ask(Request(self._cpu_s, RENDER_CPU_S_PER_BYTE, fields))
        except Stopped as error:
            reply = {"failure": "limit", "message": str(error)}
        failure, message = reply.get("failure"), reply.get("message")
        if failure is None:
            return str(reply["text"])
        if failure == "refused":
            raise UsageError(f"the model's chat template refuses the messages: {message}")
        if failure == "error":
            raise UsageError(f"{source}: the chat template cannot render the messages: {message}")
        if failure == "syntax":
            raise CheckpointError(f"{source}: the chat template does not parse: {message}")
        raise CheckpointError(f"{source}: the chat template is stopped: {message}")

    def close(self) -> None:
        """End the process; it starts again when needed."""
        self._process.close()
