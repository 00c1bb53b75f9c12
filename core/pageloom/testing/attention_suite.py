"""What every attention backend must do, as a pytest suite to inherit.

For a package that has the backend of `pageloom.contract.attention`'s example, two files more.
``pyproject.toml``::

    [project.optional-dependencies]
    test = ["pageloom[testing]"]

``test_mine.py``::

    from pageloom.testing import AttentionSuite

    class TestMine(AttentionSuite):
        backend = "mine"

Then ``pytest -rs``, which also tells what the backend refused, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pageloom.contract import AttentionBackend, AttentionSpec, KVQuantizer
from pageloom.plugins import Plugins
from pageloom.testing.attention_candidate import Candidate, RefusedError
from pageloom.testing.attention_cases import (
    CASES,
    KINDS,
    LONG,
    PLAIN,
    QUANTIZED,
    ROTATED,
    SIZES,
    Case,
    Sizes,
    UnknownFormat,
    layer,
)
from pageloom.testing.attention_rig import Rig, UnroundedRig
from pageloom.testing.attention_rotary import RotaryRig
from pageloom.testing.attention_shadow import Branch
from pageloom.testing.attention_steps import (
    LONGEST,
    contexts_that_end_near,
    copied_blocks,
    draw_steps,
    mixed_steps,
    prefix_in_same_step,
    rotated_steps,
    swapped_blocks,
)

T = TypeVar("T")

_MOVED = pytest.mark.parametrize(
    "case",
    [PLAIN, KINDS, replace(KINDS, dtype=torch.bfloat16)],
    ids=["one layer", "layers of several kinds", "bfloat16"],
)


class AttentionSuite:
    """Inherit it in a class named ``Test...`` and say which backend.

    Each case that the backend's `check` refuses is skipped with the reason that it gives. The
    others are compared with attention by its definition in float64, within
    `pageloom.testing.attention_oracle.TOLERANCE`.
    """

    backend: ClassVar[str | type[AttentionBackend]]
    """A registered name, or a class that is not registered."""

    options: ClassVar[Mapping[str, Any]] = {}
    """Fields of the backend's ``Config``, as ``attention.options`` in the YAML."""

    device: ClassVar[str] = "cpu"

    scale: ClassVar[str] = "full"
    """``"small"`` for a backend that is slow here, such as one that is interpreted: every kind of
    case, but fewer and shorter."""

    max_examples: ClassVar[int | None] = None
    """How many random sequences of steps are tried; None leaves it to `scale`."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "context" in metafunc.fixturenames:
            metafunc.parametrize("context", self.sizes().contexts)
        if "quantizer" in metafunc.fixturenames:
            metafunc.parametrize("quantizer", _quantizers())

    # Steps.

    @pytest.mark.parametrize("name", CASES)
    def test_decodes_chunks_and_prefix_hits_mix(self, name: str) -> None:
        mixed_steps(self.rig(CASES[name]))

    def test_any_steps_may_follow_each_other(self) -> None:
        """Whatever hypothesis thinks of: ragged steps of a few models, with any block size."""
        self.rig(PLAIN)  # skips if not even this is possible
        small = replace(PLAIN, layers=(layer(2, 1, 64),), max_model_len=96)
        block_sizes = self.accepted(
            (None, 1, 2, 3, 8, 32, 96), lambda size: replace(small, block_size=size)
        )
        dtypes = self.accepted((None, torch.bfloat16), lambda dtype: replace(small, dtype=dtype))
        wanted: list[dict[str, Any]] = [{}, {"window": 1}, {"window": 13}]
        wanted += [{"softcap": 2.0}, {"sinks": True}]
        features = self.accepted(
            wanted,
            lambda feature: replace(small, layers=(layer(2, 1, 64, **feature),)),
        )
        heads = self.accepted(
            ((2, 1), (1, 1), (3, 3), (9, 3)), lambda h: replace(small, layers=(layer(*h, 64),))
        )

        @settings(
            max_examples=self.max_examples or self.sizes().max_examples,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(data=st.data())
        def explore(data: st.DataObject) -> None:
            both: dict[str, Any] = {}
            for _ in range(2):
                both |= data.draw(st.sampled_from(features), "feature")
            case = Case(
                (layer(*data.draw(st.sampled_from(heads), "heads"), 64, **both), *small.layers),
                dtype=data.draw(st.sampled_from(dtypes), "dtype"),
                block_size=data.draw(st.sampled_from(block_sizes), "block size"),
                max_model_len=small.max_model_len,
            )
            if self.candidate().refusal(case):  # each alone would do, but not all together
                case = small
            draw_steps(data, self.rig(case, seed=data.draw(st.integers(0, 999), "seed")))

        explore()

    @pytest.mark.parametrize("tokens", [1, 5, 40])
    def test_a_prefix_may_be_written_in_the_same_step(self, tokens: int) -> None:
        """Whoever comes first in the batch: all is stored before anything is attended to."""
        rig = self.rig(PLAIN)
        size = rig.spec.block_size
        if size >= rig.spec.max_model_len:
            pytest.skip("one block holds a whole sequence, so that no prefix can be shared")
        first, before, after = prefix_in_same_step(rig, 2 * size, 2)
        rig.step((before, tokens), (first, 2 * size + 3), (after, tokens))
        rig.step((after, 2), (before, 1), (first, 1))

    def test_branches_that_share_blocks_diverge(self) -> None:
        rig = self.rig(KINDS)
        parent = Branch()
        rig.step((parent, 37))
        children = [rig.fork(parent) for _ in range(3)]
        for _ in range(3):
            rig.step((parent, 1), *((child, 1) for child in children))
        rig.step((children[0], 6), (parent, 2), (children[1], 1))

    def test_a_freed_block_leaves_nothing_behind(self) -> None:
        rig = self.rig(PLAIN)
        for length in (30, 17, 1, 48) * 3:
            branch = Branch()
            rig.step((branch, length))
            rig.step((branch, 1))
            rig.free(branch)

    def test_many_sequences_may_run_at_once(self) -> None:
        count = self.sizes().sequences
        rig = self.rig(replace(PLAIN, max_model_len=64), tokens=64 * count, branches=count)
        branches = [Branch() for _ in range(count)]
        rig.step(*((branch, 1 + 7 * i % 40) for i, branch in enumerate(branches)))
        rig.step(*((branch, 1) for branch in branches))
        rig.step(*((branch, 1 + (i % 10 == 3)) for i, branch in enumerate(branches)))

    def test_steps_may_come_from_another_thread(self) -> None:
        rig = self.rig(KINDS)
        branch, other = Branch(), Branch()
        rig.step((branch, 21))
        with ThreadPoolExecutor(1) as executor:
            executor.submit(rig.step, (branch, 1), (other, 30)).result()
        rig.step((branch, 1), (other, 1))

    # Lengths and values.

    def test_contexts_end_before_on_and_after_block_edges(self, context: int) -> None:
        self._long_contexts(PLAIN, context)

    @pytest.mark.parametrize("name", LONG)
    def test_long_contexts(self, name: str) -> None:
        self._long_contexts(LONG[name], self.sizes().long_context)

    def test_long_prompts(self) -> None:
        one, beside, behind = self.sizes().prompts
        longest = one + beside + 2 * behind + 2
        rig = self.rig(replace(PLAIN, max_model_len=longest), tokens=2 * longest)
        first, second = Branch(), Branch()
        rig.step((first, one))
        rig.step((second, beside), (first, 1))
        rig.step((first, behind), (second, behind))
        rig.step((first, 1), (second, one))

    @pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["default dtype", "bfloat16"])
    def test_large_scores_do_not_overflow(self, dtype: torch.dtype | None) -> None:
        """Without its maximum subtracted, the softmax of such scores is infinite in float32."""
        kinds = tuple(replace(each, scale=4.0) for each in (layer(), layer(window=30, sinks=True)))
        for layers in (kinds[:1], kinds):
            rig = self.rig(Case(layers, dtype))
            rig.slack = 5  # a score of a hundred is off by more than one of one
            branch, other = Branch(), Branch()
            rig.step((branch, 70), (other, 1))
            rig.step((branch, 1), (other, 40))
            rig.step((branch, 5), (other, 1))

    def test_slots_may_lie_beyond_two_gigabytes(self) -> None:
        """K and V have more than 2^31 elements each: no offset fits in 32 bits. Memory is only
        taken where it is written, if the backend leaves it to the system."""
        each = layer(4, 2, 128)
        (dtype,) = self.accepted(
            (torch.bfloat16, torch.float16, None), lambda dtype: Case((each,), dtype)
        )[:1] or (None,)
        case = Case((each,), dtype)
        spec = self.spec(case)
        block = spec.block_size * each.num_kv_heads * each.head_size  # elements of K or V
        last = 2**31 // block + 4
        needed = 2 * (last + 1) * block * spec.dtype.itemsize
        free = _free_memory(spec.device)
        if free is None or free < needed + 2**30:
            pytest.skip(
                f"needs {needed / 2**30:.1f} GiB, of which little is touched; "
                + ("free memory is unknown" if free is None else f"{free / 2**30:.1f} GiB are free")
            )
        marks = {2**power // (block * spec.dtype.itemsize) for power in (30, 31, 32)}
        pool = {at + i for at in (2, last - 2, *marks) for i in range(-2, 3)}
        mixed_steps(self.rig(case, pool=sorted(pool)))

    # Moving blocks.

    @_MOVED
    def test_copies_are_exact_and_happen_all_at_once(self, case: Case) -> None:
        copied_blocks(self.rig(case))

    @_MOVED
    def test_swapped_blocks_come_back_elsewhere(self, case: Case) -> None:
        swapped_blocks(self.rig(case))

    # KV formats.

    @pytest.mark.parametrize("name", QUANTIZED)
    def test_every_kv_format_is_right_or_refused(self, quantizer: str, name: str) -> None:
        mixed_steps(self.rig(replace(QUANTIZED[name], quantizer=quantizer)))

    def test_coded_blocks_are_moved_unchanged(self, quantizer: str) -> None:
        case = replace(KINDS, quantizer=quantizer)
        copied_blocks(self.rig(case))
        swapped_blocks(self.rig(case))

    def test_tokens_are_attended_to_as_they_are_stored(self, quantizer: str) -> None:
        """In their own step too, so that chunking cannot change a result."""
        case = replace(PLAIN, quantizer=quantizer)
        with _skip_refused():
            rig = UnroundedRig(self.candidate(), case)
        branch, other = Branch(), Branch()
        rig.step((branch, 20), (other, 1))
        rig.step((other, 19), (branch, 1))

    # Rotations, if the backend fuses them.

    @pytest.mark.parametrize("name", ROTATED)
    def test_q_and_k_are_rotated_where_that_is_asked(self, name: str) -> None:
        rotated_steps(self.rotary_rig(ROTATED[name]))

    def test_k_is_rotated_before_it_is_coded(self, quantizer: str) -> None:
        rotated_steps(self.rotary_rig(replace(PLAIN, quantizer=quantizer)))

    # What the tests are made of.

    @classmethod
    def sizes(cls) -> Sizes:
        if cls.scale not in SIZES:
            raise ValueError(f"{cls.__name__}.scale is {cls.scale!r}, not one of {list(SIZES)}")
        return SIZES[cls.scale]

    @classmethod
    def candidate(cls) -> Candidate:
        backend: str | type[AttentionBackend] | None = getattr(cls, "backend", None)
        if backend is None:
            raise TypeError(f'{cls.__name__} must say which backend it tests: backend = "name"')
        return Candidate(
            backend if isinstance(backend, str) else backend.__name__,
            _plugins().get("attention_backend", backend) if isinstance(backend, str) else backend,
            torch.device(cls.device),
            cls.options,
            _quantizers(),
        )

    def spec(self, case: Case) -> AttentionSpec:
        with _skip_refused():
            return self.candidate().spec(case)

    def rig(self, case: Case, **options: Any) -> Rig:
        """A rig for ``case``; a refusal skips the test."""
        with _skip_refused():
            return Rig(self.candidate(), case, **options)

    def rotary_rig(self, case: Case) -> RotaryRig:
        """The same, with q and k that the backend is to rotate."""
        if not self.candidate().backend.fuses_rotary:
            pytest.skip(f"{self.candidate().name} fuses no rotation")
        with _skip_refused():
            return RotaryRig(self.candidate(), case)

    def accepted(self, values: Iterable[T], case: Callable[[T], Case]) -> list[T]:
        """Those of ``values`` for which the backend does not refuse ``case(value)``."""
        return [value for value in values if not self.candidate().refusal(case(value))]

    def _long_contexts(self, case: Case, context: int) -> None:
        sizes = self.sizes()
        case = replace(case, max_model_len=min(context + 64, LONGEST))
        rig = self.rig(case, tokens=context + sizes.prompts[2] + 64, branches=16)
        contexts_that_end_near(rig, context, sizes.distinct, chunk=sizes.prompts[2])


@cache
def _plugins() -> Plugins:
    return Plugins.load()


@cache
def _quantizers() -> dict[str, Callable[[], type[KVQuantizer]]]:
    """How to get each KV format that a backend may be asked for."""
    names, kind = _plugins().names("kv_quantizer"), "kv_quantizer"
    return {name: partial(_plugins().get, kind, name) for name in names} | {
        UnknownFormat.NAME: lambda: UnknownFormat
    }


@contextmanager
def _skip_refused() -> Iterator[None]:
    try:
        yield
    except RefusedError as error:
        pytest.skip(str(error))


def _free_memory(device: torch.device) -> int | None:
    """Bytes, or None where there is no telling."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "cpu" and (meminfo := Path("/proc/meminfo")).exists():
        return int(meminfo.read_text().split("MemAvailable:")[1].split()[0]) * 1024
    return None
