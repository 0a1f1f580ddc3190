"""What the handlers of all routes share: a model's text side, and its engine."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from parallel_llama.engine.input_processor import InputProcessor
from parallel_llama.engine.prompts import Prompt
from parallel_llama.errors import UsageError
from parallel_llama.request import Request, SamplingParams
from parallel_llama.serve.answer import Answer
from parallel_llama.serve.engine_client import EngineClient

T = TypeVar("T")


class UnknownModel(Exception):
    """A client asked for a model that is not the one served here."""


class Service:
    """One model under one or more names, the first of which it gives as its own."""

    def __init__(self, names: Sequence[str], inputs: InputProcessor, engine: EngineClient) -> None:
        self.names, self.inputs, self.engine = names, inputs, engine
        self.created = int(time.time())
        # Templates, tokenizers and grammars work here, so that no other client waits for them.
        self._threads = ThreadPoolExecutor(4, "inputs")

    def require_model(self, name: str | None) -> None:
        """Raises: UnknownModel."""
        if name is not None and name not in self.names:
            raise UnknownModel(f"the model {name!r:.200} is not here; use {self.names[0]!r}")

    async def in_thread(self, work: Callable[[], T]) -> T:
        """What some work gives that would keep the event loop from other clients."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def submit(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Answer]:
        """Hand in prompts, all or none of them.

        Raises: UsageError, NotReady, Busy.
        """
        self.engine.require_room(len(prompts) * params.n)
        requests = await self.in_thread(lambda: self._requests(prompts, params))
        answers: list[Answer] = []
        try:
            for request in requests:
                answers.append(self.engine.submit(request))
        except BaseException:
            for answer in answers:
                answer.abandon()
            raise
        return answers

    def _requests(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[Request]:
        requests = []
        for index, prompt in enumerate(prompts):
            try:
                requests.append(self.inputs.request(index, prompt, params))
            except UsageError as error:
                if len(prompts) == 1:
                    raise
                raise type(error)(f"prompt {index}: {error}") from error
        return requests
