"""From output tokens to the text that a client sees."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from pageloom.engine.stop_strings import StopStrings
from pageloom.engine.text_stream import TextStream
from pageloom.scheduling.params import SamplingParams


class Detokenizer:
    """Streams the text of one output and ends it at the first stop string.

    Pieces never end within a character and never hold what may turn out to be a stop string.
    Joined, they are the decoded output up to the stop string that is complete first, or with it
    if ``include_stop_str_in_output`` asks for it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
    ) -> None:
        """Raises `ValueError` for a tokenizer that the library `tokenizers` does not back."""
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ValueError(
                f"{type(tokenizer).__name__} cannot decode incrementally; a fast tokenizer "
                "(PreTrainedTokenizerFast) can"
            )
        self.text = ""  # all that was returned so far
        self.stopped: str | None = None  # the stop string that ended the text
        self._params = params
        self._stream = TextStream(
            tokenizer.backend_tokenizer, prompt_token_ids, params.skip_special_tokens
        )
        self._stops = StopStrings(params.stop_strings)
        self._num_tokens = 0
        self._held = ""  # decoded, but it may be the start of a stop string

    def append(self, token_id: int) -> str:
        """Take the next output token and return the text that is certain now, maybe none.

        Stop strings count from the ``min_tokens``-th token on. Raises `ValueError` if one has
        ended the text already.
        """
        if self.stopped is not None:
            raise ValueError(f"the text has ended with the stop string {self.stopped!r}")
        self._num_tokens += 1
        return self._release(self._stream.append(token_id), end=False)

    def finish(self) -> str:
        """Return what was held back; call when the output ends, whatever ended it.

        A character that was not completed becomes replacements, as in a full decode.
        """
        if self.stopped is not None:
            return ""
        return self._release(self._stream.finish(), end=True)

    def _release(self, new: str, *, end: bool) -> str:
        """Move text from what is held and ``new`` to `text`, as far as it is certain."""
        armed = self._num_tokens >= self._params.min_tokens
        found = self._stops.find(new, armed=armed)
        known = self._held + new
        if found is not None:
            stop_end, self.stopped = found
            stop_end += len(self._held)
            keep_stop = self._params.include_stop_str_in_output
            certain = stop_end if keep_stop else stop_end - len(self.stopped)
            self._held = ""
        else:
            certain = len(known) if end else len(known) - self._stops.num_held
            self._held = known[certain:]
        self.text += known[:certain]
        return known[:certain]
