"""POST /tokenize and /detokenize, and GET /tokenizer_info."""

from collections.abc import Iterable

from starlette.responses import Response

from parallel_llama.engine.input_processor import InputProcessor
from parallel_llama.errors import UsageError
from parallel_llama.serve.asgi import JSONBody
from parallel_llama.serve.bodies import DetokenizeBody, TokenizeBody
from parallel_llama.serve.errors import json_response
from parallel_llama.serve.replies import Detokenized, TokenizerInfo, Tokens
from parallel_llama.serve.service import RequestContext
from parallel_llama.serve.tools import conversation


async def tokenize(context: RequestContext, body: TokenizeBody) -> Response:
    """Token ids of a text, or of a conversation rendered with the chat template."""
    context.service.require_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise UsageError("give either prompt or messages")
    if body.prompt is not None and (body.tools or body.chat_template_kwargs):
        raise UsageError("tools and chat_template_kwargs go with messages, not with prompt")
    reply = context.in_thread(
        lambda: _tokens(context.inputs, body).encode(), renders=body.messages is not None
    )
    return JSONBody(await context.unless_gone(reply))


def _tokens(inputs: InputProcessor, body: TokenizeBody) -> Tokens:
    if body.prompt is not None:
        tokens = inputs.tokenizer.encode(
            body.prompt, bos=body.add_special_tokens, special=body.parse_special
        )
    else:
        chat = conversation(
            inputs.chat_template,
            body.messages or (),
            body.tools or (),
            body.chat_template_kwargs or {},
            parse_special=body.parse_special,
        )
        tokens = list(inputs.encode(chat))
    texts = None
    if body.return_token_strs:
        pieces = [inputs.tokenizer.vocabulary.piece(each, skip_special=False) for each in tokens]
        texts = [piece.decode("utf-8", "replace") for piece in pieces]
    return Tokens(
        count=len(tokens), max_model_len=inputs.max_seq_len, tokens=tokens, token_strs=texts
    )


async def detokenize(context: RequestContext, body: DetokenizeBody) -> Response:
    """Text of token ids, special tokens included."""
    context.service.require_model(body.model)
    inputs = context.inputs

    def reply() -> bytes:
        inputs.check_ids("tokens", body.tokens)
        text = inputs.tokenizer.decode(body.tokens, skip_special=False)
        return Detokenized(prompt=text).encode()

    return JSONBody(await context.unless_gone(context.in_thread(reply)))


async def tokenizer_info(context: RequestContext) -> Response:
    inputs = context.inputs
    tokenizer, template = inputs.tokenizer, inputs.chat_template

    def text_of(ids: Iterable[int]) -> str | None:
        first = min(ids, default=None)
        return None if first is None else tokenizer.decode([first], skip_special=False)

    return json_response(
        TokenizerInfo(
            bos_token=text_of(() if tokenizer.bos_id is None else (tokenizer.bos_id,)),
            eos_token=text_of(tokenizer.eos_ids),
            chat_template=(template.template_text or None) if template else None,
            max_model_len=inputs.max_seq_len,
        )
    )
