"""From a schema, a regular expression or a grammar to a guide, by llguidance.

Nothing of the engine and no torch is imported here: the server tries grammars out in a process of
its own, which starts in an instant.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pageloom.engine.tokenizer_spec import tokenizer_json
from pageloom.scheduling.structured import Guide, GuideError, StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_COMPILED = 64  # that are kept; each has taken up to some ten megabytes
MASK_THREADS = 2
MASK_PATIENCE = 2.0  # seconds that a step waits for one mask; a few ten thousandths are usual

# What llguidance may spend. Its own defaults let a single step take a tenth of a second.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
# Between the parts of JSON. Without an end to it, a small model may fill its output with it.
WHITESPACE = r"[ \n\t]{0,20}"
MAX_REASON = 300  # characters of what llguidance says, which may repeat the whole grammar


def build_tokenizer(spec: str, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """From ``tokenizer.json`` as text. Takes half a second for 50,000 tokens, during which no
    other thread of Python runs. Raises `ValueError` for tokenizers that llguidance cannot use."""
    from llguidance import LLTokenizer

    ends = [token for token in eos_token_ids if 0 <= token < vocab_size]
    try:
        return LLTokenizer(spec, n_vocab=vocab_size, eos_token=ends or None)
    except Exception as error:  # whatever the library has to say about it
        raise ValueError(
            f"structured output does not work with this model's tokenizer: {error}"
        ) from error


def build_matcher(tokenizer: LLTokenizer, wanted: StructuredOutput) -> LLMatcher:
    """Raises `ValueError` that says why the text cannot be compiled. Other threads go on."""
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(tokenizer, _grammar(wanted), log_level=0, limits=LLParserLimits(**LIMITS))
    if matcher.is_error():
        raise ValueError(f"structured has a {wanted.kind} that cannot be used: {_reason(matcher)}")
    return matcher


def first_mask(matcher: LLMatcher, wanted: StructuredOutput) -> bytes:
    """What an output may begin with. Raises `ValueError` if nothing can be said, or nothing may."""
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(f"structured has a {wanted.kind} that cannot be used: {_reason(matcher)}")
    if not any(mask):
        raise ValueError(f"structured has a {wanted.kind} that no text matches")
    return mask


def _grammar(wanted: StructuredOutput) -> str:
    from llguidance import LLMatcher

    if wanted.kind == "regex":
        return LLMatcher.grammar_from_regex(wanted.text)
    if wanted.kind == "choice":
        texts = " | ".join(json.dumps(text) for text in json.loads(wanted.text))
        return LLMatcher.grammar_from_lark(f"start: {texts}")
    if wanted.kind == "grammar":
        return LLMatcher.grammar_from_lark(wanted.text)
    try:
        return LLMatcher.grammar_from_json_schema(
            wanted.text, overrides={"whitespace_pattern": WHITESPACE}
        )
    except ValueError as error:
        raise ValueError(f"structured has a json that cannot be used: {error}") from error


def _reason(matcher: LLMatcher) -> str:
    """The first line and, of a regular expression's, the one that says what is wrong with it."""
    lines = [line.strip() for line in matcher.get_error().splitlines() if line.strip()]
    first = lines[0] if lines else "no reason is given"
    if first == "NoExtensionBias":  # llguidance's word
        first = "no text begins as it says"
    if len(first) > MAX_REASON:
        first = f"{first[:MAX_REASON]}..."
    cause = next((line for line in lines if line.startswith("error: ")), "")
    return f"{first} {cause[:MAX_REASON]}".strip()


class MaskThreads:
    """Computes masks beside the steps, and gives up one that takes too long."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MASK_THREADS, "pageloom-masks")

    def start(self, compute: Callable[[], bytes]) -> Future[bytes]:
        return self._threads.submit(compute)

    def wait(self, future: Future[bytes], compute: Callable[[], bytes]) -> bytes:
        """The mask that was started, within about `MASK_PATIENCE`. Raises `GuideError`."""
        while True:
            try:
                return future.result(MASK_PATIENCE)
            except TimeoutError:
                # A thread cannot be ended, but nobody else shall wait for it.
                self._threads.shutdown(wait=False)
                self._threads = ThreadPoolExecutor(MASK_THREADS, "pageloom-masks")
                if not future.cancel():
                    raise GuideError(
                        f"it takes more than {MASK_PATIENCE:g} s for one token"
                    ) from None
                future = self.start(compute)


@dataclass
class Grammar:
    """What all guides of one grammar share. ``fault`` is why it is given up, if it is."""

    wanted: StructuredOutput
    threads: MaskThreads
    fault: str = ""


class TextGuide:
    """A `pageloom.scheduling.structured.Guide` by llguidance.

    The next mask is computed while the model computes the next logits.
    """

    def __init__(self, grammar: Grammar, matcher: LLMatcher, mask: bytes) -> None:
        """``mask`` is what may follow now."""
        self._grammar = grammar
        self._matcher = matcher
        self._mask: bytes | None = mask
        self._coming: Future[bytes] | None = None
        self._finished = False
        self._failure = ""

    @property
    def finished(self) -> bool:
        return self._finished

    def mask(self) -> bytes:
        if self._failure:
            raise GuideError(self._failure)
        if self._mask is None:
            assert self._coming is not None
            try:
                self._mask = self._grammar.threads.wait(self._coming, self._compute)
            except GuideError as error:
                self._fail(str(error))
                raise
            self._coming = None
        return self._mask

    def advance(self, token_id: int) -> None:
        if self._failure:
            return
        self.mask()  # while it is under way, the matcher is not to be touched
        self._mask = None
        if not self._matcher.consume_token(token_id):
            self._fail(f"it cannot go on: {_reason(self._matcher)}")
        elif self._matcher.is_stopped():
            self._finished, self._mask = True, b""
        else:
            self._coming = self._grammar.threads.start(self._compute)

    def fork(self) -> TextGuide:
        mask = self.mask()  # first: while it is under way, the matcher is not to be touched
        return TextGuide(self._grammar, self._matcher.deep_copy(), mask)

    def start(self) -> TextGuide:
        """A guide for another output, of one that is at the beginning. Raises `ValueError` if the
        grammar was given up in the meantime."""
        if self._grammar.fault:
            kind = self._grammar.wanted.kind
            raise ValueError(f"structured has a {kind} that was given up: {self._grammar.fault}")
        return self.fork()

    def _fail(self, reason: str) -> None:
        """It would be no better another time, so nobody shall use the grammar again."""
        self._failure = self._grammar.fault = reason

    def _compute(self) -> bytes:
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise GuideError(f"it is too complex: {_reason(self._matcher)}")
        return mask


class GuideCompiler:
    """Makes guides for one model. Any thread may call it; llguidance is imported when needed."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """``tokenizer`` is a ``PreTrainedTokenizerFast`` or None."""
        self._spec = partial(tokenizer_json, tokenizer, vocab_size)
        self._vocab_size, self._ends = vocab_size, sorted(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._threads = MaskThreads()
        self._compiled: OrderedDict[StructuredOutput, TextGuide] = OrderedDict()

    def load(self) -> LLTokenizer:
        """What takes long the first time. Raises `ValueError` if the model cannot be guided."""
        with self._lock:
            if self._tokenizer is None:
                spec = self._spec()
                if spec is None:
                    raise ValueError("structured output needs a tokenizer, and this model has none")
                self._tokenizer = build_tokenizer(spec, self._vocab_size, self._ends)
            return self._tokenizer

    def compile(self, wanted: StructuredOutput) -> Guide:
        """A guide at the beginning of a text. Raises `ValueError` for what cannot be compiled."""
        try:
            tokenizer = self.load()
        except ModuleNotFoundError as error:
            raise ValueError(
                "structured output needs llguidance: pip install 'pageloom[serve]'"
            ) from error
        with self._lock:
            if found := self._compiled.get(wanted):
                self._compiled.move_to_end(wanted)
                return found.start()
        matcher = build_matcher(tokenizer, wanted)
        grammar = Grammar(wanted, self._threads)
        guide = TextGuide(grammar, matcher, first_mask(matcher, wanted))
        with self._lock:
            self._compiled[wanted] = guide
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            return guide.start()
