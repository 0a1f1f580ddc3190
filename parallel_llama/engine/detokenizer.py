"""Converts the tokens of a completion to text and detects its end; on rank 0."""

from parallel_llama.request import Request
from parallel_llama.stop import StopChecker
from parallel_llama.tokenizer import StreamDecoder, Tokenizer


class Detokenizer:
    """The growing text of a sequence; without a tokenizer, it only finds the end.

    A sequence ends at a stop id or stop string after the request's min_tokens. Neither is a part of
    the text, unless the request has include_stop_str_in_output.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self._request, params = request, request.params
        self._decoder = (
            StreamDecoder(tokenizer, request.prompt, skip_special=params.skip_special_tokens)
            if tokenizer
            else None
        )
        self._stop = StopChecker(params.stop, shows_stop=params.include_stop_str_in_output)
        self._shown: list[str] = []
        self._n_tokens = 0
        self._stop_id: int | None = None

    @property
    def text(self) -> str:
        """All text that has been shown."""
        return "".join(self._shown)

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or the id of stop_token_ids that ended the text."""
        return self._stop.found or self._stop_id

    def push(self, token: int, is_last: bool) -> tuple[str, bool]:
        """Add a token. Returns: text to show now, and whether the completion stops here.

        With `is_last` no token follows, so no text is held back.
        """
        self._n_tokens += 1
        is_stop = token in self._request.stop_ids
        if token in self._request.params.stop_token_ids:
            self._stop_id = token
        is_text = not is_stop or self._request.params.include_stop_str_in_output
        shown = ""
        if self._decoder is not None and is_text:
            shown = self._show(self._through_stop(self._decoder.push(token)))
        if is_stop or is_last:
            shown += self.close()
        return shown, is_stop or bool(self._stop.found)

    def close(self) -> str:
        """End the sequence. Returns: the text that was held back."""
        if self._decoder is None or self._stop.found:
            return ""
        tail = self._through_stop(self._decoder.flush())
        return self._show(tail + self._stop.flush())

    def _through_stop(self, piece: str) -> str:
        """Passes a piece through the stop strings, which are ignored before min_tokens."""
        if self._n_tokens <= self._request.params.min_tokens:
            return piece
        return self._stop.push(piece)

    def _show(self, piece: str) -> str:
        if piece:
            self._shown.append(piece)
        return piece
