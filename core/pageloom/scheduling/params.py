"""How a request wants its tokens chosen and its output ended."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from pageloom.scheduling.beams import EarlyStopping
from pageloom.scheduling.errors import RequestError
from pageloom.scheduling.structured import StructuredOutput

MAX_N = 128
MAX_BEAM_WIDTH = 64
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024  # entries
MAX_STOP = 16  # strings
MAX_STOP_CHARS = 256  # per string
MAX_STOP_TOKEN_IDS = 256
# Nearer to 0 the scaled logits would leave the range of float32; so would they with penalties
# outside [0.01, 100].
MIN_TEMPERATURE = 1e-4

# Fields that beam search does not support, and the values of each that ask for nothing.
NOT_WITH_BEAMS: Mapping[str, tuple[Any, ...]] = {
    "temperature": (1.0, 0),
    "top_k": (0, -1),
    "top_p": (1.0,),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "logit_bias": (None, {}),
    "seed": (None,),
    "stop": ((),),
    "logprobs": (None,),
    "structured": (None,),
}


@dataclass(frozen=True)
class SamplingParams:
    """Names and meanings are vLLM's; those of beam search are transformers'. Checked when made:
    `RequestError` names the field at fault.

    The steps apply in this order: logit bias and the bans of ``min_tokens`` and ``structured``;
    the penalties; then, at temperature 0, the likeliest token, otherwise temperature, min_p, top_k
    and top_p, each over what the one before left.
    """

    n: int = 1
    """Outputs to return: drawn independently from one prefill, or the best of the beams."""

    beam_width: int | None = None
    """Search for the likeliest outputs with this many beams. Nothing is drawn at random, so what
    belongs to that is refused beside it, as are penalties, logit bias, stop strings and the
    log-probabilities of output tokens."""

    length_penalty: float = 1.0
    """Outputs of a beam search rank by the sum of their log-probabilities, divided by their length
    to this power: more favors longer ones. Only with ``beam_width``."""

    early_stopping: EarlyStopping = False
    """When a beam search is over, once ``beam_width`` outputs have ended: True, at once; False,
    when no live beam is likely to beat them; "never", when none can. Only with ``beam_width``."""

    temperature: float = 1.0
    """Divides the logits; 0 is greedy decoding, which ignores ``min_p``, ``top_k``, ``top_p``."""

    top_k: int = 0
    """Keep the k likeliest tokens, and those tied with the k-th; 0 or -1 keeps all."""

    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens that holds this much probability (Holtzman et
    al. 2020, "The Curious Case of Neural Text Degeneration"), and those tied with its last."""

    min_p: float = 0.0
    """Keep tokens at least this share as probable as the likeliest (Nguyen et al. 2024)."""

    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in the prompt or the output
    (Keskar et al. 2019, "CTRL")."""

    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that the output holds."""

    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for every time that the output holds it."""

    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids; each in [-100, 100]. Kept as a read-only copy."""

    seed: int | None = None
    """Makes the request repeatable, in whatever batch it runs and however often it is preempted;
    its ``n`` outputs still differ. A signed 64-bit integer."""

    stop: str | Sequence[str] | None = None
    """Strings that end the output where they first appear in its text. Kept as a tuple."""

    stop_token_ids: Sequence[int] = ()
    """Token ids that end the output, besides the model's end-of-sequence ids. Kept as a tuple."""

    ignore_eos: bool = False
    """Go on after an end-of-sequence token, up to ``max_tokens``."""

    min_tokens: int = 0
    """Until the output has this many tokens, end-of-sequence and stop tokens are never drawn and
    stop strings do not end it."""

    max_tokens: int | None = None
    """Most tokens of output. None, the default, takes all that ``max_model_len`` and the KV cache
    have room for: a model ends its answers by itself, and an answer cut off after an arbitrary
    small number looks like a fault."""

    logprobs: int | None = None
    """Return the log-probability of each output token and of this many likeliest ones."""

    prompt_logprobs: int | None = None
    """The same for each token of the prompt but the first."""

    include_stop_str_in_output: bool = False
    """Leave the stop string, or the text of the stop token, at the end of the output."""

    skip_special_tokens: bool = True
    """Leave special tokens such as ``<|im_end|>`` out of the text."""

    structured: StructuredOutput | None = None
    """The form that the text must have: tokens that do not lead to it are never drawn, and
    end-of-sequence tokens only where it is complete. The output ends where nothing can follow, even
    before ``min_tokens``; cut off by ``max_tokens``, a stop string or a stop token it may be
    incomplete. Log-probabilities stay those of the model. Not with beams or ``ignore_eos``. A
    mapping of the fields of `StructuredOutput` will do."""

    def __post_init__(self) -> None:
        self._check_integer("n", 1, MAX_N)
        if self.beam_width is not None:
            self._check_integer("beam_width", 2, MAX_BEAM_WIDTH, also=", or None for no beams")
        self._check_real("length_penalty", -10, 10)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise self._wrong("early_stopping", 'True, False or "never"')
        if not _is_real(self.temperature) or self.temperature != 0:
            self._check_real("temperature", MIN_TEMPERATURE, 100, also=", or 0 for greedy decoding")
        self._check_integer("top_k", -1, also="; 0 or -1 keeps every token")
        self._check_real("top_p", 0, 1, above=True)
        self._check_real("min_p", 0, 1)
        self._check_real("repetition_penalty", 0.01, 100)
        self._check_real("presence_penalty", -2, 2)
        self._check_real("frequency_penalty", -2, 2)
        if self.seed is not None:
            self._check_integer("seed", -(2**63), 2**63 - 1)
        self._check_integer("min_tokens", 0)
        if self.max_tokens is not None:
            self._check_integer("max_tokens", 1)
            if self.min_tokens > self.max_tokens:
                raise RequestError.of(
                    "min_tokens",
                    f"is {self.min_tokens}, more than max_tokens, {self.max_tokens}; "
                    "lower min_tokens or raise max_tokens",
                )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._check_integer(name, 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise self._wrong(name, "True or False")
        object.__setattr__(self, "logit_bias", self._checked_bias())
        object.__setattr__(self, "stop", self._checked_stop())
        object.__setattr__(self, "stop_token_ids", self._checked_stop_tokens())
        object.__setattr__(self, "structured", self._checked_structured())
        self._check_beam_search()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied and pickled by its values: a read-only mapping cannot be by itself."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.logit_bias is not None:
            values["logit_bias"] = dict(self.logit_bias)
        return _make, (values,)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as it is kept: a tuple, empty if there is none."""
        return self.stop  # type: ignore[return-value]

    def check_vocab(self, vocab_size: int) -> None:
        """Raise `RequestError` for a token id that a vocabulary of ``vocab_size`` does not have."""
        named: Iterable[tuple[str, Iterable[int]]] = (
            ("logit_bias", self.logit_bias or ()),
            ("stop_token_ids", self.stop_token_ids),
        )
        for name, token_ids in named:
            if strangers := [token for token in token_ids if token >= vocab_size]:
                raise RequestError.of(
                    name,
                    f"names token id {strangers[0]}, but the vocabulary has only "
                    f"{vocab_size} tokens; ids must be from 0 to {vocab_size - 1}",
                )

    def _wrong(self, name: str, wanted: str) -> RequestError:
        return RequestError.of(name, f"is {getattr(self, name)!r}, but must be {wanted}")

    def _check_real(
        self, name: str, low: float, high: float, *, above: bool = False, also: str = ""
    ) -> None:
        value = getattr(self, name)
        if not _is_real(value) or not low <= value <= high or (above and value == low):
            span = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
            raise self._wrong(name, f"a number {span}{also}")

    def _check_integer(
        self, name: str, low: int, high: int | None = None, *, also: str = ""
    ) -> None:
        value = getattr(self, name)
        if not _is_integer(value) or value < low or (high is not None and value > high):
            span = f"{low} or more" if high is None else f"from {low} to {high}"
            raise self._wrong(name, f"an integer {span}{also}")

    def _check_beam_search(self) -> None:
        """Between beams and other fields. Refused rather than ignored."""
        if self.beam_width is None:
            for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != default:
                    raise RequestError.of(
                        name,
                        f"is {getattr(self, name)!r}, but without beam_width there is no "
                        "beam search; set beam_width too",
                    )
            return
        if self.n > self.beam_width:
            raise RequestError.of(
                "n",
                f"is {self.n}, more than beam_width, {self.beam_width}; "
                "lower n or raise beam_width",
            )
        for name, harmless in NOT_WITH_BEAMS.items():
            if (value := getattr(self, name)) not in harmless:
                raise RequestError.of(
                    name,
                    f"is {_shown(value)}, but beam search does not support it; leave it at "
                    "its default, or leave out beam_width",
                )

    def _checked_structured(self) -> StructuredOutput | None:
        wanted = self.structured
        if isinstance(wanted, Mapping):
            try:
                wanted = StructuredOutput(**wanted)
            except TypeError as error:
                raise RequestError.of("structured", f"is not a kind and a text: {error}") from error
        if wanted is None:
            return None
        if not isinstance(wanted, StructuredOutput):
            raise self._wrong("structured", "a StructuredOutput, or None")
        if self.ignore_eos:
            raise RequestError.of(
                "structured",
                "says where an output ends, and ignore_eos that it goes on; leave out either",
            )
        return wanted

    def _checked_bias(self) -> Mapping[int, float] | None:
        if self.logit_bias is None:
            return None
        if not isinstance(self.logit_bias, Mapping):
            raise self._wrong("logit_bias", "a mapping from token ids to numbers, or None")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError.of(
                "logit_bias",
                f"has {len(self.logit_bias)} entries, but may have at most {MAX_LOGIT_BIAS}",
            )
        for token, bias in self.logit_bias.items():
            if not _is_integer(token) or token < 0:
                raise RequestError.of(
                    "logit_bias", f"has the key {token!r}, but keys must be token ids, 0 or more"
                )
            if not _is_real(bias) or not -100 <= bias <= 100:
                raise RequestError.of(
                    "logit_bias",
                    f"of token {token} is {bias!r}, but must be a number from -100 to 100",
                )
        return MappingProxyType(dict(self.logit_bias))

    def _checked_stop(self) -> tuple[str, ...]:
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop
        if stops is None:
            return ()
        if not _is_list(stops) or not all(isinstance(stop, str) for stop in stops):
            raise self._wrong("stop", "a string, a list of strings, or None")
        if len(stops) > MAX_STOP:
            raise RequestError.of(
                "stop", f"has {len(stops)} strings, but may have at most {MAX_STOP}"
            )
        for stop in stops:
            if not 1 <= len(stop) <= MAX_STOP_CHARS:
                raise RequestError.of(
                    "stop",
                    f"holds a string of {len(stop)} characters, {stop[:20]!r}, but each must "
                    f"have from 1 to {MAX_STOP_CHARS}",
                )
        return tuple(stops)

    def _checked_stop_tokens(self) -> tuple[int, ...]:
        token_ids = self.stop_token_ids
        if not _is_list(token_ids) or not all(_is_integer(t) and t >= 0 for t in token_ids):
            raise self._wrong("stop_token_ids", "a list of token ids, each 0 or more")
        if len(token_ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError.of(
                "stop_token_ids",
                f"has {len(token_ids)} ids, but may have at most {MAX_STOP_TOKEN_IDS}",
            )
        return tuple(token_ids)


def _make(values: Mapping[str, Any]) -> SamplingParams:
    return SamplingParams(**values)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return _is_integer(value) or (isinstance(value, float) and math.isfinite(value))


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _shown(value: object) -> str:
    if isinstance(value, StructuredOutput):
        return f"a {value.kind}"
    return repr(dict(value) if isinstance(value, Mapping) else value)
